"""What an image's path can be instead of an image: each has its own words and its own way on."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpuckpt.model.errors import ImageCorrupt, NotFound
from gpuckpt.stores import directory, partialimage
from gpuckpt.stores.directory import open_image


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    for name in ("empty", "cut", "cut/criu", "open"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "message", "hint"),
    [
        ("nothing", NotFound, "no such image", "that `gpuckpt dump` made"),
        ("4242", NotFound, "no such image", "for a process: --tree 4242"),
        ("file", NotFound, "is a file, not an image directory", "that `gpuckpt dump` made"),
        ("fifo", NotFound, "is no directory, not an image directory", "that `gpuckpt dump` made"),
        ("empty", ImageCorrupt, "no manifest.json in it", "is this the right directory?"),
        ("open", ImageCorrupt, "no manifest.json in it", "is this the right directory?"),
        ("cut", ImageCorrupt, "no manifest.json in it", "dump again"),
    ],
)
def test_what_is_no_image(place, name, kind, message, hint):
    with pytest.raises(kind) as caught:
        open_image(place / name)
    assert str(place / name) in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


AS_NOBODY = """
import os, sys
from pathlib import Path
from gpuckpt.model.errors import MachineLacks
from gpuckpt.stores.directory import open_image
os.setresuid(65534, 65534, 65534)
try:
    open_image(Path(sys.argv[1]))
except MachineLacks as error:
    print(error.hint)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.parametrize("unreadable", ["parent", "image", "manifest"])
def test_an_image_of_root_is_not_called_damaged_to_others(unreadable):
    with tempfile.TemporaryDirectory() as parent:  # tmp_path lies in a directory that nobody else may enter
        image = Path(parent) / "image"
        image.mkdir(mode=0o755)
        (image / "manifest.json").touch(mode=0o600)
        modes = {"parent": (0o700, 0o755), "image": (0o755, 0o700), "manifest": (0o755, 0o755)}[unreadable]
        for folder, mode in zip((image.parent, image), modes, strict=True):
            folder.chmod(mode)
        argv = [sys.executable, "-c", AS_NOBODY, str(image)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.startswith("run it as root")


def test_what_was_opened_is_what_is_read(tmp_path):
    """Whoever exchanges the directory after it was opened exchanges nothing for us."""
    image = tmp_path / "img"
    image.mkdir(mode=0o700)
    (image / "part").write_text("good")
    opened = directory._open_directory(image)
    held = directory.Image(image, None, os.open(os.devnull, os.O_RDONLY), opened)
    image.rename(tmp_path / "away")
    image.mkdir()
    (image / "part").write_text("evil")
    assert held.part("part").read_text() == "good"
    link = tmp_path / "link"
    link.symlink_to(held.part("part"))
    assert subprocess.run(["cat", link], capture_output=True, text=True).stdout == "good"
    held.close()
    assert not os.path.exists(link)


def test_publishing_replaces_nothing(tmp_path):
    partial, _ = partialimage.create_partial(tmp_path / "img")
    (tmp_path / "img").mkdir()
    with pytest.raises(FileExistsError):
        partial.publish(b"{}")
    partial.discard()
    assert list((tmp_path / "img").iterdir()) == []

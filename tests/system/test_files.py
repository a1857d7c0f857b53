"""Files that others may exchange: who could, and renames that replace nothing."""

import errno
import os
from pathlib import Path

import pytest

from gpuckpt.system import files

ME = os.geteuid()
root_only = pytest.mark.skipif(ME != 0, reason="needs root, to give files away")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    assert files.unsafe_places(tmp_path, ME) == ()
    (tmp_path / "a/b").mkdir(parents=True)
    return tmp_path


def test_the_sticky_bit_protects_what_is_ours(place):
    (place / "a").chmod(0o1777)
    assert files.unsafe_places(place / "a/b", ME) == ()
    (place / "a").chmod(0o777)
    assert files.unsafe_places(place / "a/b", ME) == (f"{place}/a has mode 0777",)
    (place / "a").chmod(0o775)
    assert files.unsafe_places(place / "a/b", ME) == (f"{place}/a has mode 0775",)


@root_only
def test_an_owner_further_up_can_exchange_it(place):
    os.chown(place / "a", 65534, -1)
    assert files.unsafe_places(place / "a/b", ME) == (f"{place}/a belongs to user 65534",)
    (place / "a").chmod(0o1777)
    assert files.unsafe_places(place / "a/b", ME) == (f"{place}/a belongs to user 65534",)


@root_only
def test_links_on_the_way_are_judged_and_so_is_where_they_lead(place):
    theirs = place / "theirs"
    theirs.mkdir()
    (theirs / "img").mkdir()
    os.chown(theirs, 65534, -1)
    (place / "link").symlink_to("a/../theirs")
    assert files.unsafe_places(place / "link/img", ME) == (f"{theirs} belongs to user 65534",)
    (theirs / "back").symlink_to(place / "a")
    assert files.unsafe_places(theirs / "back/b", ME) == (f"{theirs} belongs to user 65534",)
    os.chown(place / "link", 65534, -1, follow_symlinks=False)
    assert f"{place}/link belongs to user 65534" in files.unsafe_places(place / "link/img", ME)


def test_what_is_not_there_and_what_turns_in_circles(place):
    (place / "loop").symlink_to("loop")
    assert files.unsafe_places(place / "loop/x", ME) == ()
    assert files.unsafe_places(place / "nothing/x", ME) == ()


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("kind", ["empty directory", "file", "dangling link"])
def test_a_rename_replaces_nothing(place, kind, supported, monkeypatch):
    if not supported:
        monkeypatch.setattr(files, "_rename_no_replace", lambda *_: errno.EINVAL)
    target = place / "target"
    if kind == "empty directory":
        target.mkdir()
    elif kind == "file":
        target.touch()
    else:
        target.symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        files.rename_to_new(place / "a", target)
    assert (place / "a/b").is_dir()
    files.rename_to_new(place / "a", place / "free")
    assert (place / "free/b").is_dir()


def test_a_rename_that_fails_says_what(place):
    with pytest.raises(FileNotFoundError):
        files.rename_to_new(place / "nothing", place / "free")

"""Every part of an image, damaged in every way: 60 naming the part, before an instruction of the tree has run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.stores import directory
from tests import packing
from tests.faults import arena
from tests.faults.arena import SETTLE, Job
from tests.harness import gpuckpt

pytestmark = pytest.mark.criu


class Saved:
    """An ended job and its image; each test damages a copy."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.job = Job.start(place, 1, place / "linked")
        self.image = place / "img"
        arena.dump_and_wait(self.job, self.image)
        self.log = self.job.log.read_bytes()
        self.parts = sorted(str(path.relative_to(self.image)) for path in self.image.rglob("*") if path.is_file())
        self.packs = [part for part in self.parts if part.endswith(".zst")]

    def copy(self) -> Path:
        """A fresh copy, with the modes of the original."""
        target = self.place / "img-copy"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.image, target)
        return target

    def assert_refused(self, image: Path, status: int, *words: str) -> None:
        """The exit status, the part's name, and that nothing of the tree exists or has run."""
        answer = gpuckpt("restore", image, *SETTLE)
        assert answer.status == status, (answer.status, answer.error, answer.stderr)
        assert answer.report["process"] == "untouched"
        for word in words:
            assert word in answer.error["message"], (word, answer.error)
        assert answer.error["hint"]
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.job.pids)
        assert self.job.log.read_bytes() == self.log
        assert not arena.runs_of(*self.job.pids)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    arena.become_subreaper()
    place = tmp_path_factory.mktemp("saved")
    place.chmod(0o700)
    made = Saved(place)
    yield made
    made.job.end()


def _flip(path: Path, where: float = 0.5) -> None:
    with path.open("r+b") as file:
        size = path.stat().st_size
        offset = min(size - 1, int(size * where))
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x01]))


def _flip_what_means_something(path: Path) -> None:
    if path.suffix == ".zst":
        packing.flip_in_pack(path)
    else:
        _flip(path)


def _digested(saved: Saved) -> list[str]:
    return [part for part in saved.parts if part not in directory.NOT_DIGESTED]


def test_a_flipped_byte_in_each_file(saved):
    """The command itself for every file; a captured file is among them."""
    assert {part.partition("/")[0] for part in _digested(saved)} == {"criu", "files", "packs"}
    for part in [*_digested(saved), "manifest.json"]:
        copy = saved.copy()
        _flip_what_means_something(copy / part)
        saved.assert_refused(copy, 60, part)


def test_first_and_last_byte_of_each_part(saved):
    for part in _digested(saved):
        for where in (0.0, 1.0):
            copy = saved.copy()
            _flip(copy / part, where)
            _assert_corrupt(copy, part)


def _assert_corrupt(image: Path, part: str) -> None:
    opened = None
    with pytest.raises(ImageCorrupt) as caught:
        opened = directory.open_image(image)
        directory.verify(opened)
    if opened is not None:
        opened.close()
    assert part in caught.value.message
    assert caught.value.hint


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _missing(path: Path) -> None:
    path.unlink()


def _link(path: Path) -> None:
    """A link to the very same content: it could be changed after it was verified."""
    kept = path.parents[1] / "kept-for-a-link" if path.name == "manifest.json" else path.parents[2] / "kept-for-a-link"
    shutil.copyfile(path, kept)
    path.unlink()
    path.symlink_to(kept)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    """Whoever opens it plainly waits for ever."""
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGES = [_cut, _empty, _longer, _missing, _link, _directory, _fifo]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_each_part_is_damaged(saved, damage):
    """Every part in this process, and the command itself for three of them."""
    parts = [part for part in _digested(saved) if damage is not _empty or (saved.image / part).stat().st_size]
    for part in parts:
        copy = saved.copy()
        damage(copy / part)
        _assert_corrupt(copy, part)
    for part in ("criu/pstree.img", saved.packs[0], "packs/index", "files/0"):
        copy = saved.copy()
        damage(copy / part)
        saved.assert_refused(copy, 60, part)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_the_manifest_is_damaged(saved, damage):
    copy = saved.copy()
    damage(copy / "manifest.json")
    saved.assert_refused(copy, 60, str(copy))


def test_parts_are_swapped(saved):
    root, child = saved.job.pids
    pairs = [("criu/pstree.img", "packs/index"), (f"criu/mm-{root}.img", f"criu/mm-{child}.img")]
    pairs += [(saved.packs[0], saved.packs[1])] if len(saved.packs) > 1 else []
    for one, other in pairs:
        copy = saved.copy()
        (copy / one).rename(copy / "between")
        (copy / other).rename(copy / one)
        (copy / "between").rename(copy / other)
        saved.assert_refused(copy, 60, one.partition("/")[0])


def test_a_part_stands_twice(saved):
    """In the place of another one, each of them, or beside it under a name of its own."""
    parts = _digested(saved)
    for one, other in zip(parts, parts[1:] + parts[:1], strict=True):
        copy = saved.copy()
        shutil.copyfile(copy / one, copy / other)
        _assert_corrupt(copy, other)
    for part in (saved.packs[0], "files/0"):
        copy = saved.copy()
        twin = copy / f"{part}.zst"
        shutil.copy(copy / part, twin)
        saved.assert_refused(copy, 60, str(twin.relative_to(copy)))


def test_a_directory_of_parts_is_a_link(saved):
    copy = saved.copy()
    (copy / "criu").rename(copy.parent / "elsewhere")
    (copy / "criu").symlink_to(copy.parent / "elsewhere")
    try:
        saved.assert_refused(copy, 60, "criu", "link")
    finally:
        shutil.rmtree(copy.parent / "elsewhere")


@pytest.mark.parametrize("name", ["criu/extra.img", "files/9", "extra", "criu/sub/extra"])
def test_an_extra_file(saved, name):
    copy = saved.copy()
    (copy / name).parent.mkdir(mode=0o700, exist_ok=True)
    (copy / name).write_bytes(b"extra")
    (copy / name).chmod(0o600)
    saved.assert_refused(copy, 60, name)


def test_an_extra_link(saved):
    copy = saved.copy()
    (copy / "criu" / "extra.img").symlink_to("/etc/passwd")
    saved.assert_refused(copy, 60, "criu/extra.img")


@pytest.mark.parametrize("name", [".", "criu", "files", "manifest.json", "packs/index"])
@pytest.mark.parametrize("bit", [0o020, 0o002])
def test_writable_by_others(saved, name, bit):
    """Who can write to it can replace it after it was verified."""
    copy = saved.copy()
    (copy / name).chmod((copy / name).stat().st_mode | bit)
    saved.assert_refused(copy, 20, "can be written to by others", str(copy / name) if name != "." else str(copy))


@pytest.mark.parametrize("name", [".", "criu", "packs/index"])
def test_of_another_user(saved, name):
    copy = saved.copy()
    os.chown(copy / name, 65534, 65534)
    saved.assert_refused(copy, 20, "65534")


def test_an_unfinished_image(saved):
    """Also with a manifest in it: what was never renamed was never known to be on the disk."""
    copy = saved.copy()
    partial = copy.rename(copy.with_name("other.partial"))
    try:
        saved.assert_refused(partial, 60, "never finished")
    finally:
        shutil.rmtree(partial)


def test_a_newer_format_and_an_unknown_feature(saved):
    for change, word in (({"format": 7}, "7"), ({"requires": ["criu-files", "time-travel"]}, "time-travel")):
        copy = saved.copy()
        body = json.loads((copy / "manifest.json").read_text()) | change
        (copy / "manifest.json").write_text(json.dumps(body))
        saved.assert_refused(copy, 61, word)


def test_another_tree_in_the_manifest(saved):
    """A well-formed manifest whose processes are not those of the image."""
    from gpuckpt.model import manifest as manifests

    copy = saved.copy()
    body = json.loads((copy / "manifest.json").read_text())
    del body["blake3"]
    body["tree"]["processes"] = body["tree"]["processes"][:1]
    body["blake3"] = manifests._digest(body)
    (copy / "manifest.json").write_text(json.dumps(body))
    saved.assert_refused(copy, 60, "criu/pstree.img")


def test_the_undamaged_one_restores(saved):
    """Last, so that all the refusals above are known to be the damage's."""
    copy = saved.copy()
    arena.restore_and_wait(saved.job, copy)
    saved.job.assert_goes_on()
    saved.job.kill()
    os.truncate(saved.job.log, len(saved.log))
    saved.log = saved.job.log.read_bytes()

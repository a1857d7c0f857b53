"""Captured files: what is saved is the job's own, what is put back never replaces anything."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpuckpt.images import captured, criuformat
from gpuckpt.model.errors import DumpFailed, RestoreFailed
from gpuckpt.model.manifest import CapturedFile
from gpuckpt.system.files import placed, placed_from


@pytest.fixture
def image(tmp_path: Path) -> Path:
    made = tmp_path / "image"
    (made / "files").mkdir(parents=True)
    (made / "files/0").write_bytes(b"AAAA")
    return made


@pytest.fixture
def host(tmp_path: Path) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    return made


def entry(host: Path, **changes) -> CapturedFile:
    base = CapturedFile(
        str(host / "link_remap.1"), "files/0", "link-remap", 0o600, os.geteuid(), os.getegid(), 10**18, ""
    )
    return replace(base, **changes)


def stand_there(one: CapturedFile, content: bytes, mode: int = 0o600, mtime_ns: int = 10**18) -> Path:
    path = Path(one.path)
    path.write_bytes(content)
    path.chmod(mode)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


@pytest.mark.parametrize(
    ("content", "mode", "mtime_ns"),
    [
        (b"BBBB", 0o600, 10**18),
        (b"AAAAA", 0o600, 10**18),
        (b"AAAA", 0o644, 10**18),
        # Semaphores of the same value look alike: the time tells them apart.
        (b"AAAA", 0o600, 10**18 + 1),
    ],
)
def test_another_jobs_file_is_not_taken_over(image, host, content, mode, mtime_ns):
    one = entry(host)
    there = stand_there(one, content, mode, mtime_ns)
    with pytest.raises(RestoreFailed, match=r"link_remap\.1") as caught:
        captured.put_back(image, [one])
    assert f"rm {there}" in caught.value.hint
    assert there.read_bytes() == content


def test_a_link_in_the_way_is_not_followed(image, host):
    one = entry(host)
    elsewhere = stand_there(replace(one, path=str(host / "elsewhere")), b"AAAA")
    Path(one.path).symlink_to(elsewhere)
    with pytest.raises(RestoreFailed):
        captured.put_back(image, [one])


def test_the_dumps_own_file_stays(image, host):
    one = entry(host)
    there = stand_there(one, b"AAAA")
    assert captured.put_back(image, [one]) == []
    assert there.exists()


def test_both_names_are_made_and_taken_back(image, host):
    one = entry(host, linked_to=str(host / "sem.x"))
    made = captured.put_back(image, [one])
    assert {path.name for path in host.iterdir()} == {"link_remap.1", "sem.x"}
    assert (host / "sem.x").samefile(one.path)
    captured.remove(made)
    assert list(host.iterdir()) == []


def test_a_public_name_that_still_stands_is_shared_and_stays(image, host):
    one = entry(host, linked_to=str(host / "sem.x"))
    public = stand_there(replace(one, path=one.linked_to), b"AAAA", mtime_ns=5)
    made = captured.put_back(image, [one])
    assert public.samefile(one.path)
    captured.remove(made)
    assert list(host.iterdir()) == [public]


def test_a_failure_takes_back_what_came_before_it(image, host):
    first = entry(host, linked_to=str(host / "sem.x"))
    second = entry(host, path=str(host / "link_remap.2"))
    in_the_way = stand_there(second, b"BBBB")
    with pytest.raises(RestoreFailed):
        captured.put_back(image, [first, second])
    assert list(host.iterdir()) == [in_the_way]


def test_what_was_replaced_meanwhile_is_not_taken_back(image, host):
    one = entry(host)
    made = captured.put_back(image, [one])
    other = host / "other"
    other.write_bytes(b"another job's")
    other.rename(one.path)
    captured.remove(made)
    assert Path(one.path).read_bytes() == b"another job's"


@pytest.fixture
def remap(host, monkeypatch):
    """CRIU says that it has made link_remap.1 of 'gone'."""
    one = criuformat.LinkRemap(str(host / "link_remap.1"), str(host / "gone"))
    monkeypatch.setattr(criuformat, "link_remaps", lambda _: (one,))
    return Path(one.path)


def test_the_jobs_own_file_is_saved(tmp_path, remap, host):
    remap.write_bytes(b"AAAA")
    seen = remap.stat()
    known = {str(host / "gone"): {(seen.st_dev, seen.st_ino)}}
    (saved,) = captured.save_link_remaps(tmp_path, tmp_path / "files", known)
    assert (tmp_path / saved.part).read_bytes() == b"AAAA"
    assert (tmp_path / saved.part).stat().st_mode & 0o777 == 0o600


def test_another_file_under_its_name_is_not_saved(tmp_path, remap, host):
    remap.write_bytes(b"AAAA")
    with pytest.raises(DumpFailed, match="not the job's file"):
        captured.save_link_remaps(tmp_path, tmp_path / "files", {str(host / "gone"): {(1, 2)}})


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_plain_file_is_not_saved(tmp_path, remap, kind):
    """A link to another's secret; a FIFO that would hold the job frozen for ever."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    if kind == "link":
        remap.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(remap)
    else:
        remap.mkdir()
    with pytest.raises(OSError):
        captured.save_link_remaps(tmp_path, tmp_path / "files", {})


def test_litter_travels_through_a_message(host):
    path = host / "link_remap.1"
    path.touch()
    seen = placed(path)
    assert placed_from([seen.to_json()]) == (seen,)
    assert placed_from("nonsense") == placed_from([["x"], 7, [1, 2, 3]]) == placed_from(None) == ()
    seen.remove()
    assert not path.exists()

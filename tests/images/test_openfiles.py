"""Open files in an image: the job's own and no other, as it was while the job stood still; then compared with what is here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpuckpt.images import openfiles
from gpuckpt.images.openfiles import NotSaved
from gpuckpt.model.facts import OpenFile
from gpuckpt.system.procfs import file_here


def go_on() -> None:
    """Nobody stops us."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_bytes(b"1\n2\n3\n")
    path.chmod(0o640)
    return path


def seen(path: Path) -> OpenFile:
    """As the tree's facts have it."""
    found = file_here(str(path))
    assert found is not None
    return found


def left_in(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.exists() else []


def test_content_mode_owner_and_time_are_saved(log, tmp_path):
    saved = openfiles.save(seen(log), 7, tmp_path / "files", go_on)
    part = tmp_path / saved.captured.part
    status = log.stat()
    assert (part.name, part.read_bytes(), part.stat().st_mode & 0o777) == ("open-7", log.read_bytes(), 0o600)
    assert (saved.captured.path, saved.captured.reason, saved.size) == (str(log), "open", 6)
    assert (saved.captured.mode, saved.captured.mtime_ns) == (0o640, status.st_mtime_ns)
    assert (saved.captured.uid, saved.captured.gid) == (status.st_uid, status.st_gid)


@pytest.mark.parametrize("how", ["longer", "written", "another", "gone", "link", "mode"])
def test_what_is_not_as_the_job_left_it_is_not_saved(log, tmp_path, how):
    """Somebody outside the tree, for the tree stands still."""
    before = seen(log)
    if how == "longer":
        log.write_bytes(b"1\n2\n3\n4\n")
    elif how == "written":
        log.write_bytes(b"1\n2\n4\n")
        os.utime(log, (1, 1))
    elif how == "another":
        (tmp_path / "other").write_bytes(b"1\n2\n3\n")
        (tmp_path / "other").rename(log)
    elif how == "gone":
        log.unlink()
    elif how == "link":
        log.rename(tmp_path / "there")
        log.symlink_to(tmp_path / "there")
    else:
        log.chmod(0o600)
    with pytest.raises(NotSaved, match="log"):
        openfiles.save(before, 0, tmp_path / "files", go_on)
    assert left_in(tmp_path / "files") == []


def test_one_that_is_written_during_the_copy_is_not_saved(log, tmp_path):
    log.write_bytes(bytes(40 << 20))
    before = seen(log)

    def write() -> None:
        with log.open("ab") as out:
            out.write(b"more")

    with pytest.raises(NotSaved, match="others write into it"):
        openfiles.save(before, 0, tmp_path / "files", write)
    assert left_in(tmp_path / "files") == []


def test_what_stops_the_copy_leaves_nothing(log, tmp_path):
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        openfiles.save(seen(log), 0, tmp_path / "files", stop)
    assert left_in(tmp_path / "files") == []


@pytest.mark.parametrize(
    ("here", "how"),
    [
        (b"1\n2\n3\n", "same"),
        (b"1\n2\n3\n4\n", "grown"),
        (b"1\n2\n4\n", "other"),
        (b"1\n2\n", "other"),
        (b"1\n2\n4\n4\n", "other"),
        (b"", "other"),
    ],
)
def test_how_a_file_compares(log, tmp_path, here, how):
    saved = openfiles.save(seen(log), 0, tmp_path / "files", go_on)
    log.write_bytes(here)
    assert openfiles.compare(tmp_path / saved.captured.part, str(log), go_on) == how


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "gone"])
def test_what_is_no_plain_file_does_not_compare(log, tmp_path, kind):
    """A FIFO would hold us for ever, a link lead to another's file."""
    saved = openfiles.save(seen(log), 0, tmp_path / "files", go_on)
    log.rename(tmp_path / "there")
    if kind == "link":
        log.symlink_to(tmp_path / "there")
    elif kind == "fifo":
        os.mkfifo(log)
    elif kind == "directory":
        log.mkdir()
    assert openfiles.compare(tmp_path / saved.captured.part, str(log), go_on) is None


MEASURED = """
import resource, sys
from gpuckpt.images import openfiles
from gpuckpt.system.procfs import file_here
from pathlib import Path
file, place = file_here(sys.argv[1]), Path(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
saved = openfiles.save(file, 0, place, lambda: None)
assert openfiles.compare(place.parent / saved.captured.part, sys.argv[1], lambda: None) == "same"
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_large_file_takes_little_memory(log, tmp_path):
    with log.open("wb") as out:
        for _ in range(200):
            out.write(os.urandom(1 << 20))
    argv = [sys.executable, "-c", MEASURED, log, tmp_path / "files"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32, "MiB"


def test_a_setting_of_the_facts_alone_is_no_excuse(log, tmp_path):
    """The file on disk decides, not what a fact says of it."""
    with pytest.raises(NotSaved, match="another file"):
        openfiles.save(replace(seen(log), inode=1), 0, tmp_path / "files", go_on)

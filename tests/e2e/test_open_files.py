"""Files that a job writes, through a dump that leaves it running and a restore after they have changed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import harness
from tests.e2e import rounds
from tests.harness import PROGRAMS, Jobs, gpuckpt, wait_for

pytestmark = pytest.mark.criu

MIB = 1 << 20


@dataclass
class Writer:
    """tests/programs/filewriter.py, its file and its image."""

    jobs: Jobs
    kind: str
    file: Path
    image: Path
    pid: int = 0

    def start(self, *stride: int) -> Writer:
        argv = [sys.executable, "-E", "-S", PROGRAMS / "filewriter.py", self.kind, self.file, *stride]
        self.pid = self.jobs.start(*argv).pid
        self.await_change()
        return self

    def content(self) -> bytes:
        return self.file.read_bytes()

    def await_change(self) -> bytes:
        """It writes: that is how a job with a file of its own shows that it lives."""
        before = self.content() if self.file.exists() else b""
        return wait_for(lambda: self.file.exists() and (now := self.content()) != before and now, "it writes")

    def dump(self, *options: object) -> dict:
        return rounds.dump(self.jobs, self.pid, self.image, *options).report["data"]

    def saved(self) -> bytes:
        (one,) = [one for one in rounds.manifest(self.image)["captured"] if one["path"] == str(self.file)]
        return (self.image / one["part"]).read_bytes()

    def end(self) -> bytes:
        """It has gone on for a while when it ends; returns what its file holds then."""
        self.await_change()
        os.kill(self.pid, 9)
        rounds.await_end(self.jobs, [self.pid])
        return self.content()

    def restore(self, *options: object) -> list[dict]:
        """A restore that works, after which the job works on with the file it had."""
        answer = rounds.restore(self.jobs, self.image, *options)
        self.await_change()
        assert harness.alive(self.pid)
        if self.kind in ("log", "append"):
            harness.assert_gapless(self.file)
        return answer.report["data"]["files"]

    def refused(self, *options: object) -> tuple[set[str], str]:
        """The checks that refuse a restore, and what they say to do."""
        before = self.content() if self.file.exists() else None
        answer = gpuckpt("restore", self.image, *options)
        found = rounds.refused(answer)
        assert (self.content() if self.file.exists() else None) == before
        return found, " ".join(f["hint"] for f in answer.report["findings"] if f["id"] in found)

    def beside(self) -> list[Path]:
        return sorted(path for path in self.file.parent.iterdir() if self.file.name in path.name and path != self.file)


@pytest.fixture
def writer(jobs, work):
    def make(kind: str, file: Path | None = None) -> Writer:
        return Writer(jobs, kind, file or work / "file", work / "img")

    work.chmod(0o700)
    return make


def test_a_log_that_grew_is_cut(writer):
    job = writer("log").start()
    data = job.dump("--leave-running")
    saved = job.saved()
    assert data["restorable"] == "yes"
    (one,) = data["captured_files"]
    assert (one["path"], one["bytes"], one["seconds"] > 0) == (str(job.file), len(saved), True)
    whole = job.end()
    assert whole.startswith(saved) and len(whole) > len(saved)
    found, hint = job.refused()
    assert found == {"files-size"}
    assert "--truncate-files" in hint and "--overwrite-files" in hint
    (done,) = job.restore("--truncate-files")
    assert (done["path"], done["act"]) == (str(job.file), "cut")
    assert job.beside() == [Path(done["kept_as"])]
    assert Path(done["kept_as"]).read_bytes() == whole[len(saved) :]
    assert ".later-" in done["kept_as"]


def test_a_log_that_somebody_has_open_is_not_cut(writer):
    job = writer("log").start()
    job.dump("--leave-running")
    whole = job.end()
    with job.file.open("ab"):
        answer = gpuckpt("restore", job.image, "--truncate-files")
    assert answer.status == 40, rounds.explain(answer)
    assert f"{job.file} cannot be cut: somebody has it open" in answer.error["message"]
    assert "fuser -v" in answer.error["hint"] and "--overwrite-files" in answer.error["hint"]
    assert (job.content(), job.beside()) == (whole, [])


def test_a_log_that_another_writes_to_is_not_moved_aside(writer):
    """It would go on writing into the file that is moved aside. Who only reads it loses nothing."""
    job = writer("log").start()
    job.dump("--leave-running")
    job.end()
    other = job.file.with_name("other-name")
    os.link(job.file, other)
    with other.open("ab") as end, job.file.open("rb") as content:
        writing = subprocess.Popen(["sleep", "600"], stdout=end)
        reading = subprocess.Popen(["sleep", "600"], stdin=content)
    with writing, reading:
        answer = gpuckpt("restore", job.image, "--overwrite-files")
        assert rounds.refused(answer) == {"files-written"}
        assert f"{job.file} by {writing.pid} sleep" in answer.error["message"]
        writing.kill()
        writing.wait()
        other.unlink()
        (done,) = job.restore("--overwrite-files")
        reading.kill()
    assert done["act"] == "replace"


def test_a_log_that_grew_is_replaced(writer):
    job = writer("log").start()
    job.dump("--leave-running")
    whole = job.end()
    inode = job.file.stat().st_ino
    (done,) = job.restore("--overwrite-files")
    kept = Path(done["kept_as"])
    assert (done["act"], job.beside(), kept.read_bytes()) == ("replace", [kept], whole)
    assert kept.name.startswith("file.before-restore-")
    assert kept.stat().st_ino == inode
    assert job.file.stat().st_mode & 0o777 == 0o640


def test_an_appended_log_is_left_alone_unasked(writer):
    job = writer("append").start()
    data = job.dump("--leave-running")
    saved = job.saved()
    assert data["restorable"] == "yes"
    whole = job.end()
    answer = rounds.restore(job.jobs, job.image)
    job.await_change()
    assert answer.report["data"]["files"] == []
    assert job.content().startswith(whole)
    os.kill(job.pid, 9)
    rounds.await_end(job.jobs, [job.pid])
    (done,) = job.restore("--truncate-files")
    assert job.content().startswith(saved)
    assert Path(done["kept_as"]).read_bytes().startswith(whole[len(saved) :])


@pytest.mark.parametrize("kind", ["append", "log"])
def test_a_clone_shares_a_log_that_is_written_meanwhile(writer, kind):
    """The job goes on while it is cloned: what it writes between our looks is no reason to refuse."""
    job = writer(kind).start()
    job.dump("--leave-running")
    if kind == "log":  # as large as it was, for the dump's size is what CRIU compares; and being written again
        os.kill(job.pid, 9)
        rounds.await_end(job.jobs, [job.pid])
        job.file.write_bytes(job.saved())
        job.file.touch()
    clone = rounds.restore(job.jobs, job.image, "--clone").report["data"]
    job.await_change()
    assert harness.alive(clone["root_pid"]) and clone["files"] == []


def test_a_file_that_was_deleted_comes_back(writer):
    job = writer("log").start()
    job.dump("--leave-running")
    seen = job.file.stat()
    job.end()
    job.file.unlink()
    (done,) = job.restore()
    assert done == {"path": str(job.file), "act": "put", "kept_as": None}
    now = job.file.stat()
    assert (now.st_mode, now.st_uid, now.st_gid) == (seen.st_mode, seen.st_uid, seen.st_gid)
    assert job.beside() == []


def test_its_directory_is_missing_too(writer, work):
    (work / "logs and more").mkdir()
    job = writer("log", work / "logs and more" / "file").start()
    job.dump("--leave-running")
    job.end()
    job.file.unlink()
    job.file.parent.rmdir()
    found, hint = job.refused()
    assert found == {"directories"}
    command = hint.partition(": ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    job.restore()


def test_a_file_that_another_replaced(writer):
    job = writer("log").start()
    job.dump("--leave-running")
    job.end()
    job.file.unlink()
    job.file.write_text("another's\n")
    found, hint = job.refused("--truncate-files")
    assert found == {"files-size", "files-mode"}
    assert "--overwrite-files" in hint
    (done,) = job.restore("--overwrite-files")
    assert Path(done["kept_as"]).read_text() == "another's\n"


@pytest.mark.parametrize("kind", ["pages", "mapped"])
def test_a_data_base_that_was_changed_in_place(writer, kind):
    """Of the same size: CRIU would take it, and the job would find what it has never written."""
    job = writer(kind).start()
    assert job.dump("--leave-running")["restorable"] == "yes"
    saved = job.saved()
    later = job.end()
    assert (len(saved), saved != later) == (len(later), True)
    found, hint = job.refused("--truncate-files")
    assert found == {"files-changed"}
    assert "--truncate-files" not in hint
    (done,) = job.restore("--overwrite-files")
    assert Path(done["kept_as"]).read_bytes() == later


def test_a_file_with_two_names_stays_one_file(writer):
    """Missing, or two files by now: the job reads under one name what it writes under the other."""
    job = writer("linked").start()
    job.dump("--leave-running")
    other = job.file.with_name("file.too")
    plain = gpuckpt("inspect", job.image, "--extract", job.image.with_name("plain")).report["data"]["extracted"]
    assert f"test -e {other} || ln {job.file} {other}" in plain["commands"]
    job.end()
    job.file.unlink()
    other.unlink()
    job.restore()
    assert job.file.samefile(other)
    job.end()
    other.unlink()
    for path in (job.file, other):
        path.write_bytes(job.saved())
        path.chmod(0o640)
    found, hint = job.refused()
    assert found == {"files-changed"} and "--overwrite-files" in hint
    assert len(job.restore("--overwrite-files")) == 1
    assert job.file.samefile(other)


def test_what_is_as_it_was_is_left_alone(writer):
    job = writer("pages").start()
    job.dump("--capture-files", "writable")
    inode = job.file.stat().st_ino
    assert job.restore("--overwrite-files", "--truncate-files") == []
    assert (job.file.stat().st_ino, job.beside()) == (inode, [])


def test_holes_stay_holes(writer):
    """Sixteen numbers in 256 MiB: neither the image nor the restored file takes that much."""
    job = writer("pages").start(16 * MIB)
    job.dump("--leave-running")
    (one,) = rounds.manifest(job.image)["captured"]
    part = (job.image / one["part"]).stat()
    assert (part.st_size, part.st_blocks * 512 < 2 * MIB) == (256 * MIB, True)
    os.kill(job.pid, 9)
    rounds.await_end(job.jobs, [job.pid])
    job.file.unlink()
    answer = rounds.restore(job.jobs, job.image)
    assert [one["act"] for one in answer.report["data"]["files"]] == ["put"]
    assert job.file.stat().st_blocks * 512 < 2 * MIB
    changed = job.file.stat().st_mtime_ns
    wait_for(lambda: job.file.stat().st_mtime_ns > changed + 10**8, "it goes on with the numbers it had")


def test_without_a_copy_a_log_can_be_cut_all_the_same(writer):
    job = writer("log").start()
    data = job.dump("--leave-running", "--capture-files", "none")
    assert (data["restorable"], data["captured_files"], list(data["needs_files"])) == (
        "with-files",
        [],
        [str(job.file)],
    )
    whole = job.end()
    found, hint = job.refused("--overwrite-files")
    assert found == {"files-size"}
    assert "--truncate-files" in hint and "not known" in hint and "--overwrite-files" not in hint
    (done,) = job.restore("--truncate-files")
    size = data["needs_files"][str(job.file)]
    assert Path(done["kept_as"]).read_bytes() == whole[size:]


def test_a_dump_that_ends_the_job_saves_what_it_is_told(writer, work):
    job = writer("log").start()
    data = job.dump("--capture-files", f"{work}/fi*", "--capture-files", "writable")
    assert [one["path"] for one in data["captured_files"]] == [str(job.file)]
    job.file.unlink()
    assert [one["act"] for one in job.restore()] == ["put"]


def test_all_is_more_than_what_is_written(writer):
    job = writer("log").start()
    names = {Path(one["path"]).name for one in job.dump("--capture-files", "all")["captured_files"]}
    tree = rounds.manifest(job.image)["tree"]["files"]
    code = {Path(file["path"]).name for file in tree if any(use.endswith((" exe", " exec")) for use in file["uses"])}
    assert "file" in names
    assert code and not names & code


def test_what_is_no_file_of_the_job_is_refused(writer, work):
    job = writer("log").start()
    answer = gpuckpt("dump", "--tree", job.pid, job.image, "--capture-files", work / "other")
    assert rounds.refused(answer) == {"capture-files"}
    assert str(work / "other") in answer.error["message"]
    job.await_change()


@contextlib.contextmanager
def small(directory: Path, size: int):
    """A file system of its own, of so many bytes."""
    directory.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,size={size}", "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_a_file_on_another_file_system(writer, work):
    with small(work / "other", 10 * MIB) as other:
        job = writer("pages", other / "file").start()
        job.dump("--leave-running")
        job.end()
        job.restore("--overwrite-files")
        os.kill(job.pid, 9)
        rounds.await_end(job.jobs, [job.pid])


@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "asked"])
def test_the_disk_is_full(writer, work, asked):
    """Asked for, the dump fails and the job runs on; unasked, the image lacks the file and says so."""
    job = writer("pages").start(MIB)
    with job.file.open("r+b") as file:
        file.seek(MIB // 2)
        file.write(os.urandom(MIB // 4))
        for slot in range(1, 16):
            file.seek(slot * MIB + MIB // 2)
            file.write(os.urandom(MIB // 4))
    with small(work / "small", 3 * MIB) as place:
        job.image = place / "img"
        options = ["--leave-running", "--allow", "disk-space", "--settle", "0.2"]
        options += ["--capture-files", job.file] if asked else []
        answer = gpuckpt("dump", "--tree", job.pid, job.image, *options)
        job.await_change()
        if asked:
            assert (answer.status, answer.report["process"]) == (30, "running"), rounds.explain(answer)
            assert str(job.file) in answer.error["message"]
            assert list(place.iterdir()) == []
            return
        assert answer.status == 0, rounds.explain(answer)
        data = answer.report["data"]
        assert (data["restorable"], data["captured_files"]) == ("with-files", [])
        (left,) = [one for one in answer.report["findings"] if one["id"] == "left-files"]
        assert left["verdict"] == "fail" and str(job.file) in left["found"] and "space" in left["found"]
        assert not list((job.image / "files").glob("*"))


def test_the_largest_are_left_out_unasked(writer):
    """1.5 GiB, all of it holes: what is said is what counts, for every byte of it is read at the restore."""
    job = writer("pages").start(96 * MIB)
    answer = rounds.dump(job.jobs, job.pid, job.image, "--leave-running")
    assert answer.report["data"]["restorable"] == "with-files"
    (left,) = [one for one in answer.report["findings"] if one["id"] == "left-files"]
    assert f"{job.file} ({1536 * MIB} bytes, more than 1.0 GiB in all)" in left["found"]


def test_inspect_lists_them(writer):
    job = writer("log").start()
    job.dump("--leave-running")
    argv = [sys.executable, "-m", "gpuckpt", "inspect", "--files", job.image]
    screen = subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    assert "Captured files" in screen
    assert f"{len(job.saved())} B  open  {job.file}" in screen

"""Changes to files that are taken back: also when the process that makes them, or takes them back, is killed at any line."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuckpt.system import copying, filechanges, files, leases
from gpuckpt.system.filechanges import Attributes, FileChanges, Judged, Name

OLD = b"old" * 1000
SAVED = b"saved" * 500
LIKE = Attributes(0o640, os.geteuid(), os.getegid(), 10**18)
SOURCES = {filechanges.__file__, copying.__file__, files.__file__, leases.__file__}


class Host:
    """Three files, a part of an image, and a run's directory."""

    def __init__(self, place: Path) -> None:
        self.run, self.job, self.part = place / "run", place / "job", place / "part"
        for directory in (self.run, self.job):
            directory.mkdir()
        self.part.write_bytes(SAVED)
        for name in ("changed", "grown"):
            (self.job / name).write_bytes(OLD)
            os.utime(self.job / name, ns=(10**18, 5 * 10**17))
        self.before = self.seen()

    def seen(self) -> dict[str, tuple]:
        """Everything about every file there."""
        found = {}
        for path in self.job.iterdir():
            status = path.lstat()
            found[path.name] = (path.read_bytes(), status.st_ino, status.st_mode, status.st_mtime_ns)
        return found

    def judged(self, name: str) -> Judged:
        status = (self.job / name).stat()
        return Judged(status.st_dev, status.st_ino, status.st_size)

    def path(self, name: str) -> str:
        return str(self.job / name)

    def changes(self) -> FileChanges:
        return FileChanges(self.run, "cafe", lambda: None)

    def change(self) -> None:
        """One of each."""
        changes = self.changes()
        changes.put(self.path("missing"), self.part, LIKE)
        changes.replace(self.path("changed"), self.part, LIKE, self.judged("changed"))
        changes.put(self.path("further"), Name(self.path("missing"), *changes.made[self.path("missing")]), LIKE)
        changes.cut(self.path("grown"), 1000, 7 * 10**17, self.judged("grown"))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def killed_at(line: int, act: Callable[[], object]) -> bool:
    """Do it in a process of its own that gets SIGKILL before the n-th line of our code; False when it came through."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        return os.WIFSIGNALED(status)
    seen = 0

    def trace(frame, event, _argument):
        nonlocal seen
        if frame.f_code.co_filename not in SOURCES:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    try:
        sys.settrace(trace)
        act()
        sys.settrace(None)
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_each_does_what_it_says(host):
    host.change()
    now = host.seen()
    assert set(now) == {"missing", "further", "changed", "changed.before-restore-cafe", "grown", "grown.later-cafe"}
    assert now["missing"][0] == now["changed"][0] == SAVED
    assert now["further"] == now["missing"]
    assert (now["missing"][2] & 0o7777, now["missing"][3]) == (0o640, 10**18)
    assert now["changed.before-restore-cafe"] == host.before["changed"]
    assert now["grown"][:2] == (OLD[:1000], host.before["grown"][1])
    assert now["grown"][3] == 7 * 10**17
    assert now["grown.later-cafe"][0] == OLD[1000:]


def test_all_is_taken_back(host):
    host.change()
    assert host.changes().undo() == []
    assert host.seen() == host.before
    assert list(host.run.iterdir()) == []


def test_what_is_kept_stays(host):
    host.change()
    now = host.seen()
    host.changes().keep()
    assert filechanges.undo(host.run) == []
    assert host.seen() == now


@pytest.mark.parametrize(("what", "lines"), [("change", 100), ("undo", 50)])
def test_killed_at_any_line(tmp_path, what, lines):
    """In a program of its own: it forks, and must have no threads."""
    argv = [sys.executable, __file__, what, tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > lines
    print(f"\nkilled before each of {done.stdout.strip()} lines")


def _kill_everywhere(what: str, place: Path) -> int:
    """Kill the changes, or their undoing, before each line; what is left is taken back each time."""
    host = Host(place)
    for line in itertools.count(1):
        if what == "undo":
            host.change()
        killed = killed_at(line, host.change if what == "change" else lambda: filechanges.undo(host.run))
        assert filechanges.undo(host.run) == []
        assert host.seen() == host.before, line
        if not killed:
            return line - 1
    return 0


def test_a_cut_that_is_half_taken_back_goes_on(host):
    host.changes().cut(host.path("grown"), 1000, 7 * 10**17, host.judged("grown"))
    with (host.job / "grown").open("ab") as file:
        file.write(OLD[1000:1300])
    assert filechanges.undo(host.run) == []
    assert host.seen() == host.before


def _name(host: Host, name: str) -> Name:
    status = (host.job / name).stat()
    return Name(host.path(name), status.st_dev, status.st_ino)


def test_further_names_are_taken_back(host):
    """Also where the file they belong to was written to: nothing of it is lost by that."""
    changes = host.changes()
    changes.put(host.path("missing"), _name(host, "grown"), LIKE)
    changes.replace(host.path("changed"), _name(host, "grown"), LIKE, host.judged("changed"))
    assert (host.job / "grown").stat().st_nlink == 3
    with (host.job / "changed").open("ab") as file:
        file.write(b"later")
        assert changes.undo() == []
    now = host.seen()
    assert now.keys() == host.before.keys()
    assert now["changed"] == host.before["changed"] and now["grown"][0] == OLD + b"later"


def test_a_name_of_another_file_is_not_made(host):
    changes = host.changes()
    other = _name(host, "grown")
    (host.job / "grown").replace(host.job / "moved")
    (host.job / "grown").write_bytes(b"another's")
    with pytest.raises(OSError, match="changed"):
        changes.put(host.path("missing"), other, LIKE)
    assert changes.undo() == []
    assert not (host.job / "missing").exists() and (host.job / "grown").stat().st_nlink == 1


def test_the_last_name_stays(host):
    changes = host.changes()
    changes.put(host.path("missing"), _name(host, "grown"), LIKE)
    (host.job / "grown").unlink()
    assert "its other names are gone" in changes.undo()[0]
    assert (host.job / "missing").read_bytes() == OLD


def test_what_others_wrote_meanwhile_is_not_lost(host):
    host.change()
    with (host.job / "grown").open("ab") as file:
        file.write(b"another's")
    (host.job / "other").write_bytes(b"another's")
    (host.job / "other").rename(host.job / "changed")
    problems = host.changes().undo()
    assert len(problems) == 2
    assert any("grown.later-cafe" in one for one in problems)
    assert any("changed.before-restore-cafe" in one for one in problems)
    now = host.seen()
    assert now["grown"][0] == OLD[:1000] + b"another's"
    assert now["grown.later-cafe"][0] == OLD[1000:]
    assert now["changed"][0] == b"another's"
    assert now["changed.before-restore-cafe"] == host.before["changed"]


@pytest.mark.parametrize("how", ["longer", "in place", "only open"])
def test_what_somebody_writes_to_since_stays(host, how):
    """The undo may come days later: a job that was started anew has the file that we made, and works with it."""
    host.change()
    made = {name: host.job / name for name in ("missing", "changed")}
    opened = [path.open("r+b") for path in made.values()]
    for file in opened:
        if how != "only open":
            file.seek(0, os.SEEK_END if how == "longer" else os.SEEK_SET)
            file.write(b"results")
            file.close()
    now = host.seen()
    problems = host.changes().undo()
    for file in opened:
        file.close()
    assert {name: host.seen()[name] for name in made} == {name: now[name] for name in made}
    assert host.seen()["changed.before-restore-cafe"] == host.before["changed"]
    assert host.seen()["grown"] == host.before["grown"]
    why = "somebody has it open" if how == "only open" else "has been written to since"
    assert len(problems) == 2 and all(why in one for one in problems)
    assert f"the one from before is {host.path('changed.before-restore-cafe')}" in problems[0]
    assert host.path("missing") in problems[1]


def test_a_directory_that_is_not_there_is_said(host):
    """Unmounted, or moved: nobody can tell what is in it."""
    host.change()
    now = host.seen()
    host.job.rename(host.job.with_name("elsewhere"))
    problems = host.changes().undo()
    host.job.with_name("elsewhere").rename(host.job)
    assert {one.partition(" ")[0] for one in problems} == {host.path(name) for name in now if "-cafe" not in name}
    assert any(host.path("changed.before-restore-cafe") in one for one in problems)
    assert any(host.path("grown.later-cafe") in one for one in problems)
    assert host.seen() == now


def test_a_file_that_was_cut_and_is_gone_is_said(host):
    host.changes().cut(host.path("grown"), 1000, 7 * 10**17, host.judged("grown"))
    (host.job / "grown").unlink()
    (problem,) = host.changes().undo()
    assert "it is gone" in problem and host.path("grown.later-cafe") in problem
    assert (host.job / "grown.later-cafe").read_bytes() == OLD[1000:]


@pytest.mark.parametrize("mode", ["ab", "rb"])
def test_what_somebody_has_open_is_not_cut(host, mode):
    """A logger writes between our last look and the cut: those lines would be nowhere."""
    with (host.job / "grown").open(mode), pytest.raises(OSError, match="somebody has it open") as refused:
        _do(host, "cut", "grown", host.judged("grown"))
    assert refused.value.filename == host.path("grown")
    assert host.changes().undo() == []
    assert host.seen() == host.before


OPENED_MEANWHILE = """
import subprocess, sys, time
from pathlib import Path
from gpuckpt.system.filechanges import FileChanges, Judged
log, run = Path(sys.argv[1]), Path(sys.argv[2])
status, others = log.stat(), []

def open_it():
    if not others:
        others.append(subprocess.Popen(["sh", "-c", "echo another >> $0", log]))
        while not waits() and others[0].poll() is None:
            time.sleep(0.01)

def waits():
    lines = Path("/proc/locks").read_text().splitlines()
    return any("BREAKING" in line and f":{status.st_ino} " in line for line in lines)

try:
    FileChanges(run, "cafe", open_it).cut(str(log), 10, 10**18, Judged(status.st_dev, status.st_ino, status.st_size))
except OSError as error:
    print(error.strerror)
others[0].wait()
"""


def test_somebody_who_opens_it_meanwhile_waits_and_loses_nothing(host):
    """In a program of its own: the signal that says so would end one that does not expect it."""
    argv = [sys.executable, "-c", OPENED_MEANWHILE, host.path("grown"), host.run]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "somebody has it open\n"), done.stderr
    assert (host.job / "grown").read_bytes() == OLD + b"another\n"


def test_nonsense_in_the_journal(host):
    """Nothing of a crash may stand in the way of every later run."""
    host.change()
    with (host.run / filechanges.JOURNAL).open("ab") as journal:
        journal.write(
            b'[1]\n7\n\xff\xfe\n{"act": "cut", "path": "/x"}\n{"act": "make", "name": "y"}\n{"act": "put", "pa'
        )
    assert filechanges.undo(host.run) == []
    assert host.seen() == host.before
    assert filechanges.undo(host.part) == filechanges.undo(host.run / "none") == []


@pytest.mark.parametrize("act", ["replace", "cut"])
def test_a_file_that_has_changed_since_is_left_alone(host, act):
    judged = host.judged("grown")
    with (host.job / "grown").open("ab") as file:
        file.write(b"more")
    before = host.seen()
    with pytest.raises(OSError, match="since it was looked at"):
        _do(host, act, "grown", judged)
    assert host.changes().undo() == []
    assert host.seen() == before


def _do(host: Host, act: str, name: str, judged: Judged) -> None:
    changes = host.changes()
    if act == "put":
        changes.put(host.path(name), host.part, LIKE)
    elif act == "replace":
        changes.replace(host.path(name), host.part, LIKE, judged)
    else:
        changes.cut(host.path(name), 10, 10**18, judged)


@pytest.mark.parametrize("act", ["put", "replace", "cut"])
@pytest.mark.parametrize("where", ["itself", "its directory"])
def test_no_link_is_followed(host, tmp_path, act, where):
    """The directory may belong to the job's user, and what it leads to, to root."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_bytes(OLD)
    if where == "itself":
        (host.job / "file").symlink_to(secret / "file")
        name = "file"
    else:
        (host.job / "below").symlink_to(secret)
        name = "below/new" if act == "put" else "below/file"
    status = (secret / "file").stat()
    with pytest.raises(OSError):
        _do(host, act, name, Judged(status.st_dev, status.st_ino, status.st_size))
    assert host.changes().undo() == []
    assert (os.listdir(secret), (secret / "file").read_bytes()) == (["file"], OLD)
    assert sorted(os.listdir(host.job)) == sorted([*host.before, name.partition("/")[0]])


def test_nothing_is_put_over_what_has_appeared(host):
    (host.job / "missing").write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        _do(host, "put", "missing", host.judged("grown"))
    assert host.changes().undo() == []
    assert (host.job / "missing").read_bytes() == b"another's"


def test_stopped_in_the_middle_of_a_copy(host):
    """A signal, the deadline."""

    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    (host.part).write_bytes(os.urandom(1 << 20))
    changes = FileChanges(host.run, "cafe", stop)
    with pytest.raises(Stop):
        changes.cut(host.path("grown"), 10, 10**18, host.judged("grown"))
    assert changes.undo() == []
    assert host.seen() == host.before


def test_a_name_that_becomes_too_long(host):
    long = "x" * 250
    (host.job / long).write_bytes(OLD)
    before = host.seen()
    with pytest.raises(OSError):
        _do(host, "replace", long, host.judged(long))
    assert host.changes().undo() == []
    assert host.seen() == before


def test_a_name_that_is_no_text(host):
    name = os.fsdecode(b"caf\xe9 \n log")
    (host.job / name).write_bytes(OLD)
    before = host.seen()
    _do(host, "cut", name, host.judged(name))
    assert host.changes().undo() == []
    assert host.seen() == before


if __name__ == "__main__":
    print(_kill_everywhere(sys.argv[1], Path(sys.argv[2])))

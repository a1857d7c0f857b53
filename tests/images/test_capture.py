"""The far end of `criu dump --stream`, with the real CRIU: what is captured is what CRIU writes itself."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import blake3
import pytest

from gpuckpt.images import captureworker, cuts, framesource, lean, packs, sharing
from gpuckpt.images.capture import Capture, Settings
from gpuckpt.images.encoding import FrameCoder
from gpuckpt.system import procfs
from tests import harness

pytestmark = pytest.mark.criu

HEAD = "import ctypes, mmap, os, signal, sys, time\n"
TAIL = "\nopen(sys.argv[1], 'w').close()\nwhile True: signal.pause()\n"
PROGRAMS = {
    "private": "a = bytearray(os.urandom(1 << 20) * 40)",
    "half zero": """
        a = bytearray(40 << 20)
        for at in range(0, len(a), 2 << 20): a[at : at + (1 << 20)] = os.urandom(1 << 20)
        for at in range(0, len(a), 4096): a[at] |= 0
        """,
    "all zero": """
        a = bytearray(40 << 20)
        for at in range(0, len(a), 4096): a[at] = 0
        """,
    "two processes, shared memory": """
        both = mmap.mmap(-1, 20 << 20); both[:] = os.urandom(1 << 20) * 20
        memfd = os.memfd_create("x"); os.ftruncate(memfd, 1 << 24); m = mmap.mmap(memfd, 1 << 24); m[5 << 20 : 9 << 20] = os.urandom(4 << 20)
        common = bytearray(os.urandom(9 << 20))
        said, say = os.pipe()
        if os.fork() == 0:
            own = bytearray(os.urandom(9 << 20)); common[: 1 << 20] = os.urandom(1 << 20); os.close(0)
            os.write(say, b"x")
            while True: signal.pause()
        os.read(said, 1)
        """,
    "60,000 mappings": """
        libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
        for n in range(60000):
            at = libc.mmap(None, 4096, 3, 0x22, -1, 0); ctypes.memset(at, n % 255 + 1, 64)
            if n % 2: libc.mprotect(ctypes.c_void_p(at), 4096, 1)
        """,
    "reservations of terabytes": """
        libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
        for k in range(3):
            at = libc.mmap(None, ctypes.c_size_t(2 << 40), 3, 0x4022, -1, 0)
            for n in range(500): ctypes.memset(at + n * (1 << 30), n % 255 + 1, 4096)
        a = bytearray(os.urandom(9 << 20))
        """,
}


@pytest.fixture
def start(jobs, tmp_path):
    def begin(text: str) -> int:
        ready = tmp_path / "ready"
        body = HEAD + textwrap.dedent(text) + TAIL
        job = jobs.start(sys.executable, "-c", body, ready, cwd="/")
        harness.wait_for(ready.exists, "the program is ready")
        jobs.adopt(*children(job.pid))
        time.sleep(0.1)
        return job.pid

    return begin


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def criu(root: int, images: Path, work: Path, *options: str) -> subprocess.CompletedProcess:
    program, _ = harness.criu_or_reason()
    for path in (images, work, work / "none"):
        path.mkdir(exist_ok=True, parents=True)
    argv = [program, "dump", "--no-default-config", "-D", images, "-W", work, "-o", work / "log", "-L", work / "none"]
    argv += ["--manage-cgroups=ignore", "-R", "-t", root, *options]
    return subprocess.run([*map(str, argv)], stdin=subprocess.DEVNULL, capture_output=True, timeout=120)


class Streamed:
    """A capture of a process that goes on afterwards."""

    def __init__(
        self, out: Path, *, workers: int = 2, level: int | None = -1, base: sharing.Base | None = None
    ) -> None:
        self.out = out
        for name in ("s", "criu", "packs"):
            (out / name).mkdir(parents=True)
        self.base = base
        self.capture = Capture(
            out / "s",
            out / "criu",
            out / "packs",
            Settings(workers, level),
            cuts_for=self.cuts,
            known=base.known() if base else None,
        )
        self.capture.start()

    def cuts(self, pid: int) -> cuts.Cuts | None:
        layout = procfs.page_layout(pid)
        return layout and cuts.cut(pid, layout.mappings, layout.runs, self.base.index.windows if self.base else ())

    def run(self, root: int) -> sharing.Joined:
        done = criu(root, self.out / "s", self.out / "work", "--stream")
        assert done.returncode == 0, (done, (self.out / "work" / "log").read_text()[-2000:])
        assert self.capture.wait_complete(30)
        captured = self.capture.finish()
        for one in captured.small:
            path = self.out / "criu" / one.name
            assert (path.stat().st_size, blake3.blake3(path.read_bytes()).hexdigest()) == (one.size, one.blake3)
        joined = sharing.join(captured, self.base, self.out / "packs")
        joined.index = packs.decode(packs.encode(joined.index), "index")
        assert {path.name for path in (self.out / "packs").iterdir()} == {pack.file for pack in joined.index.packs}
        return joined


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize(("workers", "level"), [(2, -1), (5, None)])
def test_what_is_captured_is_what_criu_writes(start, tmp_path, kind, workers, level):
    root = start(PROGRAMS[kind])
    streamed = Streamed(tmp_path / "streamed", workers=workers, level=level)
    try:
        index = streamed.run(root).index
    finally:
        streamed.capture.close()
    done = criu(root, tmp_path / "plain", tmp_path / "work")
    assert done.returncode == 0, (done, (tmp_path / "work" / "log").read_text()[-2000:])
    with packs.PackReader(tmp_path / "streamed" / "packs", index) as reader:
        lean.write(tmp_path / "streamed" / "criu", lean.pages_files(index.files, None), reader)
    plain = {path.name: path for path in (tmp_path / "plain").iterdir()}
    assert plain.keys() == {path.name for path in (tmp_path / "streamed" / "criu").iterdir()}
    different = 0
    for name in index.files:
        ours, theirs = (tmp_path / "streamed" / "criu" / name).read_bytes(), plain[name].read_bytes()
        assert len(ours) == len(theirs), name
        different += sum(ours[at : at + 4096] != theirs[at : at + 4096] for at in range(0, len(ours), 4096))
    # The program's own stack has seen a signal-like interruption in between.
    assert different <= 4
    stored = sum(pack.size for pack in index.packs)
    if kind == "all zero" or (level is not None and kind == "half zero"):
        assert stored < index.raw_bytes() * (0.7 if "half" in kind else 0.4)
    harness.wait_for(lambda: harness.state(root) == "S", "it goes on")


def test_memory_that_is_there_twice_is_stored_once(start, tmp_path):
    root = start(
        "piece = os.urandom(4 << 20)\na = [mmap.mmap(-1, 4 << 20, flags=0x22) for _ in range(9)]\nfor m in a: m[:] = piece; mmap.mmap(-1, 4096)"
    )
    streamed = Streamed(tmp_path / "streamed", level=None)
    try:
        index = streamed.run(root).index
    finally:
        streamed.capture.close()
    assert sum(pack.size for pack in index.packs) < index.raw_bytes()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), OSError(5, "Input/output error")])
def test_a_dying_worker_ends_the_dump_and_the_tree_goes_on(start, tmp_path, monkeypatch, error):
    root = start("a = bytearray(os.urandom(40 << 20))  # no two frames are equal, so that each is encoded")
    calls = []

    def encode(self, raw):
        calls.append(raw)
        if len(calls) > 3:
            raise error
        return raw, False

    monkeypatch.setattr(captureworker.FrameCoder, "encode", encode)
    streamed = Streamed(tmp_path / "streamed")
    try:
        done = criu(root, tmp_path / "streamed" / "s", tmp_path / "work", "--stream")
        assert done.returncode != 0
        with pytest.raises(type(error)):
            streamed.capture.wait_complete(10)
    finally:
        streamed.capture.close()
    harness.wait_for(lambda: harness.state(root) == "S", "the tree goes on")
    assert not list((tmp_path / "streamed" / "packs").iterdir())


def test_broken_off_in_the_middle_the_tree_goes_on(start, tmp_path):
    root = start(PROGRAMS["two processes, shared memory"])
    streamed = Streamed(tmp_path / "streamed")
    breaker = threading.Thread(
        target=lambda: (harness.wait_for(lambda: streamed.capture.raw_bytes, "data"), streamed.capture.fail())
    )
    breaker.start()
    try:
        assert criu(root, tmp_path / "streamed" / "s", tmp_path / "work", "--stream").returncode != 0
    finally:
        breaker.join()
        streamed.capture.close()
    harness.wait_for(lambda: harness.state(root) == "S", "the tree goes on")


def test_broken_off_at_any_moment_criu_never_waits_for_us(start, tmp_path):
    """Also before its connection was accepted: pipes that lie in a socket keep a writer waiting."""
    root = start("a = bytearray(os.urandom(1 << 20) * 3)")
    rng = random.Random(7)
    for number in range(30):
        place = tmp_path / str(number)
        streamed = Streamed(place)
        breaker = threading.Timer(rng.uniform(0, 0.25), streamed.capture.fail)
        breaker.start()
        try:
            began = time.monotonic()
            criu(root, place / "s", place / "work", "--stream")
            assert time.monotonic() - began < 20
        finally:
            breaker.join()
            streamed.capture.close()
        harness.wait_for(lambda: harness.state(root) == "S", "the tree goes on")
    assert len(list(Path("/proc/self/fd").iterdir())) < 100, "descriptors are left open"


def test_nobody_comes_and_the_capture_is_closed(tmp_path):
    before = threading.active_count()
    Streamed(tmp_path / "streamed").capture.close()
    assert threading.active_count() == before
    assert not list((tmp_path / "streamed" / "packs").iterdir())


class TestBase:
    """A second dump writes what is new; the image it makes needs no other."""

    def changed(self, jobs, tmp_path, first: Path, *, megabytes=64):
        job = jobs.python("changing.py", tmp_path / "log", megabytes)
        harness.wait_for_count(tmp_path / "log", 1)
        one = Streamed(first, level=None)
        index = one.run(job.pid).index
        one.capture.close()
        job.send_signal(signal.SIGUSR1)
        harness.wait_for(lambda: "CHANGED" in (tmp_path / "log").read_text(), "the memory changes")
        return job.pid, index

    def test_little_is_written_and_all_is_there(self, jobs, tmp_path):
        root, index = self.changed(jobs, tmp_path, tmp_path / "one")
        two = Streamed(tmp_path / "two", base=sharing.Base(tmp_path / "one" / "packs", index, 2))
        joined = two.run(root)
        two.capture.close()
        assert joined.written <= 0.25 * joined.index.raw_bytes()
        assert joined.shared
        for path in (tmp_path / "one" / "packs").iterdir():
            path.unlink()
        with packs.PackReader(tmp_path / "two" / "packs", joined.index) as reader:
            framesource.verify_all(reader, joined.index)

    def test_a_pack_that_is_hardly_used_is_rewritten(self, tmp_path):
        made = TestBase.pack(tmp_path / "one", [b"a" * 5000, b"b" * 5000, b"c" * 5000])
        base = sharing.Base(tmp_path / "one", made, 1)
        (tmp_path / "two").mkdir()
        old = made.files["pages-1.img"][1]
        frames = {"pages-1.img": (packs.Frame(0, 5000, 1, old.at, old.stored, old.compressed, old.digest),)}
        joined = sharing.join(captured(frames), base, tmp_path / "two")
        assert [pack.size for pack in joined.index.packs] == [old.stored]
        assert (joined.shared, joined.written) == (0, old.stored)
        with packs.PackReader(tmp_path / "two", joined.index) as reader:
            assert bytes(reader.read(joined.index.files["pages-1.img"][0])) == b"b" * 5000

    def test_across_file_systems_it_is_copied(self, tmp_path, monkeypatch):
        made = TestBase.pack(tmp_path / "one", [b"a" * 5000, b"b" * 5000])
        (tmp_path / "two").mkdir()
        base = sharing.Base(tmp_path / "one", made, 1)
        frames = {
            "pages-1.img": tuple(
                packs.Frame(f.offset, f.raw, 1, f.at, f.stored, f.compressed, f.digest)
                for f in made.files["pages-1.img"]
            )
        }

        def refuse(*_, **__):
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr("os.link", refuse)
        joined = sharing.join(captured(frames), base, tmp_path / "two")
        assert "cross-device" in joined.notes[0]
        assert not joined.shared
        with packs.PackReader(tmp_path / "two", joined.index) as reader:
            framesource.verify_all(reader, joined.index)

    @staticmethod
    def pack(directory: Path, pieces: list[bytes]) -> packs.Index:
        directory.mkdir()
        writer, coder, frames, offset = packs.PackWriter(directory, 0), FrameCoder(None), [], 0
        for piece in pieces:
            stored, compressed = coder.encode(memoryview(piece))
            at = writer.append(stored)
            frames.append(packs.Frame(offset, len(piece), 0, at, len(stored), compressed, packs.digest_of(piece)))
            offset += len(piece)
        return packs.settled({"pages-1.img": frames}, [writer.finish()])


def captured(files):
    from gpuckpt.images.capture import Captured

    return Captured((), (None,), files, ())

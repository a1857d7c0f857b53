"""pytest fixtures: a fake GPU driver at the C interface, and processes that use it.

def test_it(fake_gpu, start_fake_cuda_app):
    app = start_fake_cuda_app("--mib", "16")
    fake_gpu.configure(total=64 << 20)          # see fakegpu.h for the keys
    fake_gpu.fail("lock=600")                   # see device.c and libnvidia_ml.c for the words
    subprocess.run([...gpuckpt...], env=fake_gpu.environment)
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIBRARIES = {"libcuda.so.1": "libcuda.c", "libnvidia-ml.so.1": "libnvidia_ml.c", "libfakedevice.so": "device.c"}
COMPILE_SECONDS = 60
START_SECONDS = 60.0
"""On a machine that is busy with other tests."""


def compile_library(source: str, target: Path, *flags: str) -> Path:
    """Compile one of the C files here; skips the test, saying so, where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake GPU driver")
    argv = [
        compiler,
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-pthread",
        *flags,
        "-o",
        str(target),
        str(HERE / source),
        "-ldl",
    ]
    subprocess.run(argv, check=True, timeout=COMPILE_SECONDS)
    return target


class FakeGpu:
    """A directory that is a host's GPUs. `environment` starts programs that shall see them."""

    def __init__(self, directory: Path, libraries: Path) -> None:
        self.directory = directory
        self.libraries = directory / "lib"
        # Copied, not linked: the loader gives one handle for one inode, and the library looks at its own path.
        shutil.copytree(libraries, self.libraries)
        self._write_program(directory / "bin" / "cuda-checkpoint")

    def _write_program(self, path: Path) -> None:
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "cuda_checkpoint.py"} "$@"\n')
        path.chmod(0o755)

    @property
    def libcuda(self) -> str:
        """The path of the fake libcuda.so.1."""
        return str(self.libraries / "libcuda.so.1")

    @property
    def program(self) -> str:
        """The path of the stand-in for cuda-checkpoint."""
        return str(self.directory / "bin" / "cuda-checkpoint")

    @property
    def variables(self) -> dict[str, str]:
        """What must be added to an environment."""
        return {
            "FAKEGPU_DIR": str(self.directory),
            "LD_LIBRARY_PATH": _before(str(self.libraries), "LD_LIBRARY_PATH"),
            "PATH": _before(str(self.directory / "bin"), "PATH"),
            "PYTHONPATH": _before(str(ROOT), "PYTHONPATH"),
        }

    @property
    def environment(self) -> dict[str, str]:
        """A whole environment, for the fake applications and for gpuckpt."""
        return {**os.environ, **self.variables}

    def configure(self, **values: object) -> None:
        """Add lines to config; `others_0=5` writes others.0=5. Later lines win."""
        with (self.directory / "config").open("a") as config:
            for name, value in values.items():
                config.write(f"{name.replace('_', '.') if name[-1].isdigit() else name}={value}\n")

    def fail(self, *faults: str) -> None:
        """Replace the faults; none clears them."""
        (self.directory / "faults").write_text("".join(f"{fault}\n" for fault in faults))

    def calls(self) -> list[tuple[str, int]]:
        """Every call that reached a process so far: (action, pid as the process sees it)."""
        path = self.directory / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(action, int(pid)) for action, pid in map(str.split, lines)]

    def used_bytes(self, gpu: int = 0) -> int:
        """The memory that processes have on a GPU."""
        return sum(path.stat().st_size for path in self.directory.glob(f"gpu{gpu}/*.mem"))


def _before(directory: str, variable: str) -> str:
    """A search path that begins with `directory`."""
    return ":".join(filter(None, (directory, os.environ.get(variable))))


class FakeApp:
    """A started fake_cuda_app.py; `pid` stays valid over a dump and a restore."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.log = log
        self.is_reaped = True
        """As any parent does: till then its pid is taken. Set it to False to keep the zombie."""
        threading.Thread(target=self._reap, args=(os.pidfd_open(self.pid),), daemon=True).start()

    def steps(self) -> list[int]:
        """The kernels' counter, line by line."""
        return [int(line) for line in self._lines(self.log) if line.isdecimal()]

    def thread_counts(self, thread: int = 0) -> list[int]:
        """The counter of a plain thread, line by line."""
        return [int(line) for line in self._lines(Path(f"{self.log}.t{thread}"))]

    def wait_for_steps(self, more: int, timeout: float = 20.0) -> None:
        """Wait until `more` kernels have run from now on."""
        start, end = len(self.steps()), time.monotonic() + timeout
        while len(self.steps()) < start + more:
            assert time.monotonic() < end, f"no {more} steps within {timeout} s: {self.log}"
            time.sleep(0.01)

    def checksum(self, timeout: float = 20.0) -> str:
        """The digest of the GPU memory, asked of the process itself."""
        start, end = len(self._checksums()), time.monotonic() + timeout
        os.kill(self.pid, signal.SIGUSR1)
        while len(self._checksums()) <= start:
            assert time.monotonic() < end, f"no checksum within {timeout} s: {self.log}"
            time.sleep(0.01)
        return self._checksums()[-1]

    def restore_tid(self) -> int:
        """The restore thread, found by its name."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            if (task / "comm").read_text().startswith("cuda0000"):
                return int(task.name)
        raise AssertionError("no restore thread")

    def stop(self) -> None:
        """End it, whether it is our child or was restored since; its children too."""
        for pid in _pids_with(str(self.log)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def _reap(self, pidfd: int) -> None:
        """Not by waiting: a wait would also take the stops of whoever traces it from this very process."""
        with open(pidfd, "rb", buffering=0):
            select.select([pidfd], [], [])
            if self.is_reaped:
                self.process.wait()

    def _checksums(self) -> list[str]:
        return [line.split()[1] for line in self._lines(self.log) if line.startswith("XSUM ")]

    @staticmethod
    def _lines(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []


def _pids_with(argument: str) -> list[int]:
    """The processes that have this very argument."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and argument.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="session")
def fake_gpu_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three libraries, compiled once."""
    directory = tmp_path_factory.mktemp("fakegpu-libraries")
    for name, source in LIBRARIES.items():
        compile_library(source, directory / name)
    return directory


@pytest.fixture
def fake_gpu(fake_gpu_libraries: Path):
    """A fake GPU host of its own. Its path is short: unix socket names hold 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="fakegpu-"))
    yield FakeGpu(directory, fake_gpu_libraries)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def start_fake_cuda_app(fake_gpu: FakeGpu, tmp_path: Path):
    """Start fake_cuda_app.py with the given options; ended after the test."""
    apps: list[FakeApp] = []

    def start(*options: str, log: Path | None = None, environment: dict[str, str] | None = None) -> FakeApp:
        path = log or tmp_path / f"app{len(apps)}.log"
        process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_cuda_app.py"), str(path), *options],
            env={**fake_gpu.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        app = FakeApp(process, path)
        apps.append(app)
        app.wait_for_steps(1, START_SECONDS)
        return app

    yield start
    for app in apps:
        app.stop()

"""The machinery of tests/gpu's matrix, with a stand-in that needs no GPU: what it passes, and that it fails what it must."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import jobs, rounds
from tests.gpu.rows import ALL_ROWS, WORKLOADS, Refusal, Row
from tests.gpu.workloads import contract

ROOT = Path(__file__).parents[2]
WATCHED = Refusal(("inotify",), ("/proc",))


def stand_in(*options: str, **row) -> Row:
    return Row("stand-in", "no GPU at all", "standin.py", options, **row)


@pytest.fixture
def started(tmp_path):
    """started(row): a job that ends with the test."""
    found: list[jobs.Job] = []

    def start(row: Row) -> jobs.Job:
        found.append(jobs.start(row, sys.executable, tmp_path / f"job{len(found)}"))
        return found[-1]

    yield start
    for job in found:
        job.end()


@pytest.mark.criu
@pytest.mark.parametrize(
    "row",
    [stand_in("--child", logs=("", ".child")), stand_in("--no-rule", twin=True)],
    ids=["rule, two processes", "twin"],
)
def test_a_row_goes_through_a_dump_and_a_restore(started, tmp_path, row):
    job, figures = started(row), {}
    job.await_start()
    before = len(job.steps(""))
    rounds.round_trip(job, tmp_path / "image", figures)
    assert len(job.steps("")) > before + 6
    assert job.start_seconds > 0
    assert figures["processes"] == len(row.logs)
    assert figures["restore_wall_seconds"] > 0 < figures["running_seconds"]
    assert {"dump_seconds", "restore_seconds", "frozen_seconds", "raw_bytes", "stored_bytes"} <= figures.keys()
    rounds.remove(tmp_path / "image")
    assert not (tmp_path / "image").exists()
    everything = job.pids()
    assert len(everything) == len(row.logs)
    job.end()
    assert not job.pids()


@pytest.mark.criu
def test_a_row_is_refused(started, tmp_path):
    job = started(stand_in("--watch", refused=WATCHED))
    job.await_start()
    said = rounds.refused(job, tmp_path / "image", {})
    assert said.startswith("inotify: ") and "/proc" in said
    rounds.refused(job, tmp_path / "image", {}, "--dry-run")


@pytest.mark.criu
@pytest.mark.parametrize(
    ("row", "why"),
    [
        (stand_in(refused=WATCHED), "not refused; the image brought it back, digests equal"),
        (stand_in("--watch", refused=Refusal(("gpu-files",), ())), "by another check"),
        (stand_in("--watch", refused=Refusal(("inotify",), ("no such word",))), "'no such word' is not said"),
    ],
)
def test_a_refusal_that_is_none_fails_its_row(started, tmp_path, row, why):
    job = started(row)
    job.await_start()
    with pytest.raises(AssertionError, match=why):
        rounds.refused(job, tmp_path / "image", {})


@pytest.mark.criu
def test_a_dump_that_is_refused_fails_a_row_that_expects_none(started, tmp_path):
    """And the row says by which check."""
    job = started(stand_in("--watch"))
    job.await_start()
    with pytest.raises(AssertionError, match="inotify"):
        rounds.round_trip(job, tmp_path / "image", {})


def test_a_program_that_ends_at_its_start_fails_with_its_own_words(started):
    job = started(stand_in("--die", "1"))
    with pytest.raises(AssertionError, match="as it was told, after 1 steps"):
        job.await_start()


def test_a_program_that_ends_later_fails_with_its_own_words(started):
    job = started(stand_in("--die", "5"))
    job.await_start()
    with pytest.raises(AssertionError, match="has ended: as it was told"):
        job.await_steps(20)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda lines: lines[:4] + lines[5:], "log: "),  # a step is lost
        (lambda lines: lines[:4] + lines[3:], "log: "),  # a step was made twice
        (lambda lines: [*lines[:4], f"STEP 4 {int(lines[4].split()[2]) + 1}", *lines[5:]], "step 4 does not follow"),
    ],
)
def test_a_wrong_log_is_seen(tmp_path, damage, why):
    value, lines = 12345, ["RULE 64"]
    for number in range(1, 9):
        lines.append(f"STEP {number} {value}")
        value = contract.follows(value, 64)
    job = jobs.Job.__new__(jobs.Job)  # nothing is started: only the log is judged
    job.row, job.twin, job.log = stand_in(), None, tmp_path / "log"
    job.log.write_text("\n".join(lines) + "\nSTEP 9 half a li")
    job.assert_whole()
    job.log.write_text("\n".join(damage(lines)) + "\n")
    with pytest.raises(AssertionError, match=why):
        job.assert_whole()


def test_a_twin_that_differs_is_seen(tmp_path):
    both = []
    for name, value in (("log", "0x1.0p+0"), ("twin", "0x1.1p+0")):
        job = jobs.Job.__new__(jobs.Job)
        job.row, job.twin, job.log, job.pid = stand_in(twin=True), None, tmp_path / name, os.getpid()
        job.log.write_text(f"STEP 1 0x1.8p+1\nSTEP 2 {value}\n")
        both.append(job)
    both[0].twin = both[1]
    with pytest.raises(AssertionError, match=r"step 2 is 0x1\.0p\+0, uninterrupted it is 0x1\.1p\+0"):
        both[0].assert_whole()


def test_the_table():
    names = [row.name for row in ALL_ROWS]
    assert len(set(names)) == len(names)
    for row in ALL_ROWS:
        assert row.name.isidentifier(), f"{row.name}: -k could not name it"
        assert (WORKLOADS / row.program).exists(), row
        assert row.logs, row
    used = {row.program for row in ALL_ROWS}
    shared = {"contract.py", "torchstate.py", "tokenreader.py", "rates.py", "standin.py"}
    assert {path.name for path in WORKLOADS.iterdir() if path.is_file()} == used | shared


@pytest.mark.parametrize("path", sorted(WORKLOADS.glob("*.py")), ids=lambda path: path.name)
def test_workloads_are_python_that_compiles(path):
    compile(path.read_text(), path, "exec")


def test_the_cuda_program_compiles(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    argv = ["nvcc", "-arch=sm_90", "-Werror", "all-warnings", "-o", tmp_path / "counter", WORKLOADS / "counter.cu"]
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_that_were_not_run_are_recorded_as_skipped(tmp_path):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("here they would be run")
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu/test_matrix.py",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "eager or jax",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**environment, "GPUCKPT_GPU_OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("rows-*.json")
    found = {entry["row"]: entry["outcome"] for entry in json.loads(file.read_text())}
    assert found.keys() == {"eager", "jax"}
    assert all(outcome.startswith("skipped: ") for outcome in found.values()), found


ROWS_OF_A_FAKE_GPU = """
import sys
from tests.gpu import conftest, rows

conftest.torch_python = lambda: sys.executable  # whichever: the stand-ins need none
stand_in = lambda name, *options, **more: rows.Row(name, "a stand-in", "standin.py", options, **more)
rows.ROWS = (
    stand_in("whole", "--gpu-mib", "16"),
    stand_in("refused", "--gpu-mib", "8", "--watch", refused=rows.Refusal(("inotify",), ("/proc",))),
    stand_in("dies", "--die", "1"),
    stand_in("wrongly_refused", "--watch"),
    stand_in("too_large", gpus=9),
)
"""


@pytest.mark.criu
def test_the_whole_matrix_on_a_fake_gpu(fake_gpu, tmp_path):
    """What runs on a GPU host, but for the rows: each result is recorded, and a row that fails stops no other."""
    fake_gpu.configure(total=8 << 30)
    (tmp_path / "fewrows.py").write_text(ROWS_OF_A_FAKE_GPU)
    argv = [sys.executable, "-m", "pytest", "tests/gpu/test_matrix.py", "-q", "-p", "fewrows", "-k", "test_row"]
    environment = {name: value for name, value in fake_gpu.environment.items() if not name.startswith("PYTEST_")}
    environment |= {"GPUCKPT_GPU_OUT": str(tmp_path / "out"), "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert "2 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    (file,) = (tmp_path / "out").glob("rows-*.json")
    found = {entry["row"]: entry for entry in json.loads(file.read_text())}
    outcomes = {name: entry["outcome"] for name, entry in found.items()}
    assert outcomes["whole"] == "passed"
    assert outcomes["refused"].startswith("passed: refused (inotify: ")
    assert outcomes["dies"].startswith("failed: AssertionError: dies ended before its first steps: as it was told")
    assert (
        outcomes["wrongly_refused"].startswith("failed: AssertionError: dump: {")
        and "inotify" in outcomes["wrongly_refused"]
    )
    assert outcomes["too_large"].startswith("skipped: needs 9 GPUs, here is ")
    whole = found["whole"]
    assert whole["gpu_memory_bytes"] >= 16 << 20
    assert {"gpu_to_host", "capture"} <= whole["dump_seconds"].keys()
    assert {"criu", "host_to_gpu"} <= whole["restore_seconds"].keys()
    assert whole["gpu"] and whole["driver"] and whole["criu"]
    assert not [one for one in Path("/dev/shm").glob("gpuckpt-gpu-tests-*") if any(one.iterdir())]

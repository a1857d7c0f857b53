"""The matrix (rows.py) on a real GPU: each workload goes on after a dump and a restore, or its dump is refused.

All selected workloads are started at once, for their imports take most of the time; then one after the other is saved and
brought back. A start that fails fails only its own row.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import jobs, rounds
from tests.gpu.rows import REMAP, ROWS, Row

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.timeout(480)]

IO_URING = Path("/proc/sys/kernel/io_uring_disabled")


@pytest.fixture(scope="module")
def io_uring_off():
    """io_uring_off(): from now on nobody gets one; put back afterwards."""
    before = IO_URING.read_text()
    yield lambda: IO_URING.write_text("2")
    if IO_URING.read_text() != before:
        IO_URING.write_text(before)


@pytest.fixture(scope="module")
def started(request, tmp_path_factory, this_host, python_with_torch, io_uring_off):
    """The jobs of all selected rows that this host can run, by name; a start that raises is its row's failure."""
    rows = [item for item in request.session.items if getattr(item, "originalname", "") == "test_row"]
    chosen = {item.callspec.params["row"].name for item in rows}
    found: dict[str, jobs.Job | str] = {}
    # The table's order: what starts fast comes first, and the others get on with it meanwhile.
    for row in (row for row in ROWS if row.name in chosen and not jobs.why_not(row, this_host["gpus"])):
        if row.io_uring_off:
            io_uring_off()
        try:
            found[row.name] = jobs.start(row, python_with_torch, tmp_path_factory.mktemp(row.name))
        except Exception as failure:
            found[row.name] = f"{type(failure).__name__}: {failure}"
    yield found
    for job in found.values():
        if isinstance(job, jobs.Job):
            job.end()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(request, started, place, record, this_host, row: Row):
    figures = record.begin(request.node, row.name, about=row.about, **this_host)
    if reason := jobs.why_not(row, this_host["gpus"]):
        pytest.skip(reason)
    job = started[row.name]
    assert isinstance(job, jobs.Job), f"could not be started: {job}"
    try:
        job.await_start()
        # Imports of all workloads at once: no measure of a cold start.
        figures["start_among_others_seconds"] = job.start_seconds
        if row.refused is None:
            rounds.round_trip(job, place / row.name, figures)
            record(row.name, outcome="passed")
        else:
            record(row.name, outcome=f"passed: refused ({rounds.refused(job, place / row.name, figures)})")
    finally:
        job.end()
        rounds.remove(place / row.name)


def test_remap(request, tmp_path, place, record, this_host, python_with_torch):
    """Onto the other GPU and back; the driver says where its memory lies."""
    figures = record.begin(request.node, REMAP.name, about=REMAP.about, **this_host)
    if reason := jobs.why_not(REMAP, this_host["gpus"]):
        pytest.skip(reason)
    job = jobs.start(replace(REMAP, restore_options=swap(this_host["gpus"])), python_with_torch, tmp_path)
    try:
        job.await_start()
        first = gpus_of(job.pid)
        rounds.round_trip(job, place / "there", figures)
        there = gpus_of(job.pid)
        assert there and not there & first, f"was on {first}, is on {there}"
        rounds.round_trip(job, place / "back", figures)
        assert gpus_of(job.pid) == first
        record(REMAP.name, outcome="passed")
    finally:
        job.end()
        rounds.remove(place / "there", place / "back")


def swap(gpus: int) -> tuple[str, ...]:
    """GPU 0 and GPU 1 change places. Every GPU the process could see is named: the driver refuses a map that leaves one out."""
    pairs = [(0, 1), (1, 0), *((number, number) for number in range(2, gpus))]
    return tuple(word for old, new in pairs for word in ("--gpu", f"{old}={new}"))


def gpus_of(pid: int) -> set[str]:
    """The GPUs on which a process has memory, as the driver says."""
    asked = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    return {uuid.strip() for number, uuid in (line.split(",") for line in lines) if int(number) == pid}

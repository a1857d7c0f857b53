"""The report on GPU runs: what it makes of rows that passed, failed, were skipped, or are not there."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.gpu import report
from tests.gpu.rows import ALL_ROWS

SCRIPT = Path(report.__file__)
HOST = {"gpu": "NVIDIA H200", "driver": "580.159.04", "criu": "4.2.1"}
GRAPH = {
    "row": "graph", "time": "2026-11-30 20:00:00", "about": "a graph", "outcome": "passed", **HOST,
    "gpu_memory_bytes": 2 << 30, "raw_bytes": 4 << 30, "stored_bytes": 1 << 30, "frozen_seconds": 2.5,
    "dump_seconds": {"lock": 0.001, "gpu_to_host": 1.0, "capture": 0.5}, "running_seconds": 3.25,
    "restore_seconds": {"criu": 0.25, "inject": 0.75, "host_to_gpu": 0.5},
}  # fmt: skip
RATES = {
    "gpu_to_pinned": 4 << 30, "pinned_to_gpu": 8 << 30, "memory_copy_all": 16 << 30, "image_write_all": 8 << 30, "cores": 16,
}  # fmt: skip
RATIO = {"dump": 1.75, "restore_to_running": 2.7, "cold_start": 4.0}


@pytest.fixture
def reported(tmp_path):
    """reported(*entries): each in a file of its own, as runs write them; the output and the picture."""

    def run(*entries: dict) -> tuple[str, str]:
        for number, entry in enumerate(entries):
            (tmp_path / f"rows-{number}.json").write_text(json.dumps([entry]))
        argv = [sys.executable, str(SCRIPT), str(tmp_path), "--svg", str(tmp_path / "out.svg")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd="/")
        assert done.returncode == 0, done.stderr
        return done.stdout, (tmp_path / "out.svg").read_text()

    return run


def line_of(output: str, row: str) -> dict[str, str]:
    """The cells of one row of the first table."""
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in output.partition("\n\n")[0].splitlines()
    ]
    return next(dict(zip(lines[0], line, strict=True)) for line in lines if line[0].strip() == row)


def test_a_row_that_passed(reported):
    output, _ = reported(GRAPH)
    assert line_of(output, "graph") == {
        "row": "graph",
        "what": "a graph",
        "outcome": "passed",
        "GPU GiB": "2.00",
        "image GiB: raw, stored": "4.00, 1.00",
        "dump s": "gpu_to_host 1.00, capture 0.50",
        "frozen s": "2.50",
        "restore s": "criu 0.25, inject 0.75, host_to_gpu 0.50",
        "to first step s": "3.25",
        "cold start s": "",
        "plain procedure: times as long": "",
        "when, where": "2026-11-30, NVIDIA H200, 580.159.04, CRIU 4.2.1",
    }
    assert "no floor" in output


def test_rows_without_a_result_are_not_run(reported):
    output, _ = reported(GRAPH)
    for row in ALL_ROWS:
        if row.name != "graph":
            assert line_of(output, row.name)["outcome"] == "not run"
            assert line_of(output, row.name)["when, where"] == ""


def test_failures_say_why_and_do_not_break_the_table(reported):
    output, drawing = reported(
        {"row": "jax", "time": "2026-11-30 20:00:00", "outcome": "failed: a|b\nTraceback", **HOST}
    )
    assert line_of(output.replace("\\|", "/"), "jax")["outcome"] == "failed: a/b Traceback"
    assert "jax" not in drawing


@pytest.mark.parametrize("order", [1, -1])
def test_the_newest_result_counts(reported, order):
    failed = {"row": "graph", "time": "2026-11-30 21:00:00", "outcome": "failed: later"}
    output, _ = reported(*[GRAPH, failed][::order])
    assert line_of(output, "graph")["outcome"] == "failed: later"


def test_results_of_other_tests_are_listed_too(reported):
    other = {
        "row": "three clones",
        "time": "2026-11-30 20:00:00",
        "outcome": "passed",
        "restore_seconds": [{"criu": 1.0}],
    }
    output, drawing = reported(GRAPH, {**other, "restore_seconds": None}, {**other, "restore_seconds": [{"criu": 1.0}]})
    assert line_of(output, "three clones")["outcome"] == "passed"
    assert "three clones" not in drawing


def test_ratios_to_the_plain_procedure(reported):
    output, _ = reported({**GRAPH, "row": "big_16", "ratios": RATIO, "ratios_huge_pages": {**RATIO, "dump": 2.0}})
    assert line_of(output, "big_16")["plain procedure: times as long"] == (
        "dump 1.8, restore 2.7, cold start 4.0; --huge-pages: dump 2.0, restore 2.7, cold start 4.0"
    )


def test_the_floor(reported):
    rates = {"row": "rates", "time": "2026-11-30 19:00:00", "outcome": "passed", "rates": RATES}
    output, _ = reported(rates, GRAPH)
    assert "| graph | gpu_to_host | gpu_memory_bytes 2.00 GiB | gpu_to_pinned 4.3 GB/s | 0.50 | 1.00 | 2.0 |" in output
    assert "| graph | capture | raw_bytes 4.00 GiB | memory_copy_all 17.2 GB/s | 0.25 | 0.50 | 2.0 |" in output
    assert "| graph | capture | stored_bytes 1.00 GiB | image_write_all 8.6 GB/s | 0.12 | 0.50 | 4.0 |" in output
    assert "| graph | criu + inject | raw_bytes 4.00 GiB | memory_copy_all 17.2 GB/s | 0.25 | 1.00 | 4.0 |" in output
    assert "| graph | host_to_gpu | gpu_memory_bytes 2.00 GiB | pinned_to_gpu 8.6 GB/s | 0.25 | 0.50 | 2.0 |" in output
    assert "| rates |" not in output


def test_the_picture(reported):
    _, drawing = reported(GRAPH)
    rectangles = [one.attrib for one in ET.fromstring(drawing) if one.tag.endswith("rect")][1:]
    colours = [report.COLOURS[p] for p in ("lock", "gpu_to_host", "capture", "criu", "inject", "host_to_gpu")]
    assert [one["fill"] for one in rectangles] == colours
    widths = [float(one["width"]) for one in rectangles]
    assert widths[1] == pytest.approx(2 * widths[2], abs=0.2)
    assert sum(widths[:3]) == pytest.approx(380, abs=0.2)

"""The text that node_exporter reads: well-formed whatever the names are, and counting on over runs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuckpt.model import metrics
from gpuckpt.model.metrics import NotOurs, RunFigures, updated

GOOD = RunFigures("dump", "job", 1796047527.5, 0, True, {"capture": 1.5, "publish": 0.25}, 2.0, 1000, 400, 100)
BAD = RunFigures("dump", "job", 1796047600.0, 22, False)


def parsed(text: str) -> dict[tuple[str, frozenset], float]:
    """Samples as a collector reads them: a parser of the format's own words, independent of ours."""
    found, typed, current = {}, set(), ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current not in typed and kind in ("gauge", "counter"), line
            typed.add(current)
        elif not line.startswith("# HELP "):
            name, rest = re.match(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{", line)[1], line.partition("{")[2]
            assert name == current, "samples of a family stand together, behind its type"
            labels, value = _labels(rest)
            key = (name, frozenset(labels.items()))
            assert key not in found, line
            found[key] = float(value)
    return found


def _labels(rest: str) -> tuple[dict[str, str], str]:
    labels = {}
    while not rest.startswith("} "):
        name, rest = re.match(r'([a-zA-Z_][a-zA-Z0-9_]*)="(.*)', rest, re.DOTALL).groups()
        value = ""
        while not rest.startswith('"'):
            step = 2 if rest.startswith("\\") else 1
            value += {"\\\\": "\\", '\\"': '"', "\\n": "\n"}[rest[:2]] if step == 2 else rest[0]
            rest = rest[step:]
        labels[name], rest = value, rest[1:].removeprefix(",")
    return labels, rest[2:]


def value(text: str, name: str, command: str = "dump", job: str = "job", **more: str) -> float | None:
    return parsed(text).get((name, frozenset({"command": command, "name": job, **more}.items())))


def test_a_success_has_all_figures():
    text = updated("", GOOD)
    assert {name for name, _ in parsed(text)} == set(metrics.FAMILIES)
    assert value(text, "gpuckpt_last_success_timestamp_seconds") == 1796047527.5
    assert value(text, "gpuckpt_last_run_exit_status") == 0
    assert value(text, "gpuckpt_phase_seconds", phase="capture") == 1.5
    assert value(text, "gpuckpt_frozen_seconds") == 2.0
    assert value(text, "gpuckpt_image_shared_bytes") == 100


def test_a_failure_keeps_what_the_last_success_was():
    text = updated(updated("", GOOD), BAD)
    assert value(text, "gpuckpt_last_success_timestamp_seconds") == 1796047527.5
    assert value(text, "gpuckpt_last_run_timestamp_seconds") == 1796047600.0
    assert value(text, "gpuckpt_last_run_exit_status") == 22
    assert value(text, "gpuckpt_runs_total") == 2
    assert value(text, "gpuckpt_runs_failed_total") == 1
    assert value(text, "gpuckpt_phase_seconds", phase="capture") == 1.5


def test_a_first_failure_has_no_success():
    text = updated("", BAD)
    assert value(text, "gpuckpt_last_success_timestamp_seconds") is None
    assert value(text, "gpuckpt_runs_failed_total") == 1


def test_phases_of_an_older_success_go():
    text = updated(updated("", GOOD), replace(GOOD, seconds={"lock": 1.0}))
    assert value(text, "gpuckpt_phase_seconds", phase="capture") is None
    assert value(text, "gpuckpt_phase_seconds", phase="lock") == 1.0


def test_others_in_the_file_stay():
    others = [replace(GOOD, name="job2"), replace(BAD, command="restore"), replace(GOOD, name='job",x="')]
    text = ""
    for run in (*others, GOOD, BAD, GOOD):
        text = updated(text, run)
    assert value(text, "gpuckpt_runs_total") == 3
    assert value(text, "gpuckpt_runs_total", job="job2") == 1
    assert value(text, "gpuckpt_runs_failed_total", command="restore") == 1
    assert value(text, "gpuckpt_phase_seconds", job='job",x="', phase="capture") == 1.5


@pytest.mark.parametrize(
    "text",
    ["root:x:0:0:root:/root:/bin/bash\n", "node_load1 0.5\n", "gpuckpt_runs_total 1\n", 'gpuckpt_other{a="b"} 1\n', "\0", "<html>"],
)  # fmt: skip
def test_a_file_that_is_something_else_is_refused(text):
    with pytest.raises(NotOurs):
        updated(text, GOOD)


@pytest.mark.parametrize("count", ["NaN", "-1", "1e9", "9" * 400, "x"])
def test_a_count_that_is_none_begins_anew(count):
    text = f'gpuckpt_runs_total{{command="dump",name="job"}} {count}\n'
    assert value(updated(text, GOOD), "gpuckpt_runs_total") == 1


@settings(deadline=None)
@given(st.text(), st.text(max_size=8), st.text(max_size=8))
def test_any_name_is_a_label(name, command, phase):
    run = replace(GOOD, name=name, command=command, seconds={phase: 1.0})
    text = updated(updated("", run), run)
    assert value(text, "gpuckpt_runs_total", command, name) == 2
    assert value(text, "gpuckpt_phase_seconds", command, name, phase=phase) == 1.0


def test_bytes_that_are_no_text_are_shown():
    text = updated("", replace(GOOD, name="caf\udce9"))
    assert text.encode()
    assert value(text, "gpuckpt_runs_total", job="caf\\udce9") == 1

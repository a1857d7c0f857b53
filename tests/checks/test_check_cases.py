"""Every check passes on its passing facts, fails on its failing ones, and says what to do."""

import re

import cases_dump
import cases_restore
import pytest
from checkfacts import dump, gpu_dump, gpu_restore, restore

from gpuckpt.checks import DUMP_CHECKS, RESTORE_CHECKS, blocking, judge

LISTS = {"dump": (DUMP_CHECKS, cases_dump.CASES), "restore": (RESTORE_CHECKS, cases_restore.CASES)}
ALL = [
    pytest.param(check, cases, id=f"{verb}-{check.id}") for verb, (checks, cases) in LISTS.items() for check in checks
]

NEVER_CERTAIN = {"file-locks"}
"""Checks that only ever say that something cannot be known."""


@pytest.mark.parametrize(("check", "cases"), ALL)
def test_the_passing_case_passes(check, cases):
    case = cases[check.id]
    finding = check.finding(case.passing, frozenset())
    if case.quiet:
        assert finding is None
    else:
        assert (finding.verdict, finding.hint) == ("pass", "")
        assert finding.expected
        assert finding.found


@pytest.mark.parametrize(("check", "cases"), ALL)
def test_the_failing_case_fails_and_says_what_to_do(check, cases):
    case = cases[check.id]
    finding = check.finding(case.failing, frozenset())
    assert finding.verdict == "fail" or check.id in NEVER_CERTAIN
    assert finding.id == check.id
    assert finding.status == check.status
    assert finding.hint
    for word in case.words:
        assert word in finding.found
    assert finding.blocks == (check.severity == "block")


@pytest.mark.parametrize(("check", "cases"), ALL)
def test_words_are_single_lines(check, cases):
    finding = check.finding(cases[check.id].failing, frozenset())
    for text in (check.summary, finding.expected, finding.found, finding.hint):
        assert text == text.strip()
        assert "\n" not in text
        assert "None" not in text


@pytest.mark.parametrize("verb", LISTS)
def test_every_check_has_its_own_id_and_both_cases(verb):
    checks, cases = LISTS[verb]
    ids = [check.id for check in checks]
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(cases)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in ids)
    assert all(check.summary and len(check.summary) < 80 for check in checks)


@pytest.mark.parametrize(
    ("checks", "facts"),
    [(DUMP_CHECKS, dump()), (DUMP_CHECKS, gpu_dump()), (RESTORE_CHECKS, restore()), (RESTORE_CHECKS, gpu_restore())],
)
def test_an_ordinary_job_is_not_refused(checks, facts):
    findings = judge(checks, facts, frozenset())
    assert blocking(findings) == ()
    assert [f.id for f in findings if f.verdict != "pass" and f.severity != "note"] == []


def test_the_irreversible_ones_are_marked():
    marked = {check.id for check in (*DUMP_CHECKS, *RESTORE_CHECKS) if check.irreversible}
    assert marked == {"nccl-sharing", "gpu-memory", "gpu-same-driver"}

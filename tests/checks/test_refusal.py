"""What becomes of findings: blocks, overrides, the error and its exit status."""

from dataclasses import replace

import pytest
from cases_restore import CASES as RESTORE_CASES
from checkfacts import DRIVER, GPU0, GPU1, STDOUT_PIPE, driver, dump, gpu_restore, host, process, restore, tree

from gpuckpt.checks import DUMP_CHECKS, RESTORE_CHECKS, allow_error, blocking, judge, refusal, unknown_ids
from gpuckpt.model.errors import Busy, MachineLacks, NotFound, Refused, UsageError
from gpuckpt.model.report import Finding

NOBODY = frozenset()


def finding(name, status=20, **changes):
    return replace(Finding(name, "fail", "block", "an order", "a mess", "tidy up", status), **changes)


def test_nothing_to_refuse():
    assert refusal(judge(DUMP_CHECKS, dump(), NOBODY)) is None
    assert refusal([finding("a", severity="warn"), finding("b", verdict="pass"), finding("c", allowed=True)]) is None


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((20, 22, 21, 10), MachineLacks),
        ((20, 22, 21), NotFound),
        ((20, 22), Busy),
        ((20, 20), Refused),
        ((22,), Busy),
    ],
)
def test_the_gravest_status_wins(statuses, kind):
    error = refusal([finding(f"check-{status}", status) for status in statuses])
    assert type(error) is kind
    assert error.process == "untouched"


def test_one_finding_speaks_for_itself():
    error = refusal(judge(DUMP_CHECKS, dump(tree(root_process=process(io_uring=True))), NOBODY))
    assert "1000 python has one" in error.message
    assert "kernel.io_uring_disabled=2" in error.hint


def test_an_override_is_offered_only_where_going_on_can_work():
    little = judge(DUMP_CHECKS, dump(image_space_bytes=1), NOBODY)
    assert refusal(little).hint.endswith("(--allow disk-space goes on all the same)")
    hopeless = judge(RESTORE_CHECKS, restore(ids_in_use={1000: "1000 sh"}), NOBODY)
    assert "--allow" not in refusal(hopeless).hint


def test_what_criu_always_fails_at_cannot_be_allowed():
    fixed = {check.id for check in (*DUMP_CHECKS, *RESTORE_CHECKS) if not check.allowable}
    assert fixed >= {
        *("terminal", "stdio", "pids-free", "ports-free", "addresses"),
        *("files-size", "files-missing", "directories", "files-mode", "files-build", "gpu-libraries"),
        *("traced", "io-uring", "kernel-objects", "unix-outside", "inotify", "gpu-files"),
    }


def test_what_cannot_be_undone_is_not_offered():
    full = gpu_restore(host=driver(gpus=(replace(GPU0, memory_free_bytes=0), GPU1)))
    assert "--allow" not in refusal(judge(RESTORE_CHECKS, full, NOBODY)).hint


def test_several_are_counted_and_named():
    facts = dump(tree(root_process=process(io_uring=True, tracer_pid=812)), host=host(privileged=False))
    error = refusal(judge(DUMP_CHECKS, facts, NOBODY))
    assert type(error) is MachineLacks
    assert "3 checks refused: privilege, traced, io-uring" in error.message
    assert "sudo" in error.hint
    assert "--allow" not in error.hint


def test_allow_opens_a_block_and_is_recorded():
    facts = restore(free_memory_bytes=1)
    findings = judge(RESTORE_CHECKS, facts, frozenset({"host-memory"}))
    assert blocking(findings) == ()
    assert [f.id for f in findings if f.allowed] == ["host-memory"]


def test_allow_opens_nothing_else():
    facts = restore(tree(outside_stdio=(STDOUT_PIPE,)), free_memory_bytes=1)
    findings = judge(RESTORE_CHECKS, facts, frozenset({"host-memory", "stdio"}))
    assert [f.id for f in blocking(findings)] == ["stdio"]


def test_some_checks_cannot_be_opened():
    findings = judge(DUMP_CHECKS, dump(image_exists=True), frozenset({"image-absent"}))
    assert [f.id for f in blocking(findings)] == ["image-absent"]
    assert not any(f.allowed for f in findings)


def test_unknown_is_shown_and_blocks_only_where_it_cannot_be_undone():
    unread = gpu_restore(host=driver(gpus=(replace(GPU0, memory_free_bytes=None, mig_enabled=None), GPU1)))
    found = {f.id: f for f in judge(RESTORE_CHECKS, unread, NOBODY)}
    assert (found["gpu-mig"].verdict, found["gpu-mig"].blocks) == ("unknown", False)
    assert (found["gpu-memory"].verdict, found["gpu-memory"].blocks) == ("unknown", True)
    opened = {f.id: f for f in judge(RESTORE_CHECKS, unread, frozenset({"gpu-memory"}))}
    assert (opened["gpu-memory"].allowed, opened["gpu-memory"].blocks) == (True, False)


def test_an_image_without_driver_version_is_refused():
    facts = gpu_restore(made_host=host(gpu=replace(DRIVER, version=None)))
    assert "gpu-same-driver" in [f.id for f in blocking(judge(RESTORE_CHECKS, facts, NOBODY))]


def test_names_that_are_no_checks():
    assert unknown_ids({"pids-free", "io-ring", "zzzzzz"}) == {"io-ring": "io-uring", "zzzzzz": None}
    error = allow_error({"io-ring"})
    assert isinstance(error, UsageError)
    assert "io-uring" in error.hint
    assert "cannot be overridden" in allow_error({"image-absent"}).message
    assert allow_error({"host-memory", "gpu-memory"}) is None


def test_every_finding_has_the_keys_of_the_contract():
    for found in judge(RESTORE_CHECKS, RESTORE_CASES["gpu-memory"].failing, NOBODY):
        assert set(found.to_json()) == {"id", "verdict", "severity", "expected", "found", "hint"}

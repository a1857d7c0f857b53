"""What a person reads: results, failures, warnings, silence."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import BLOCKING, NOTE, PASSING, UNKNOWN, dump_report, process_report, restore_report

from gpuckpt.cli import canvas, words
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.render import failure_lines, present, result_lines, warning_lines
from gpuckpt.model import errors
from gpuckpt.model.report import Report

PERSISTENCE = "gpuckpt: warning: persistence-mode: GPU 0: off (expected: on); turn it on: nvidia-smi -pm 1"
HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[2])


class Terminal(io.StringIO):
    """Memory that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def use_terminals(monkeypatch):
    """Called by the test itself: pytest sets the streams anew after the fixtures."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "80")


def test_success_is_one_line_on_stdout(monkeypatch):
    use_terminals(monkeypatch)
    assert present(dump_report(findings=()), Manner()) == 0
    assert sys.stdout.getvalue().count("\n") == 1
    assert sys.stdout.getvalue().startswith("dumped 4242 (4 processes) to /var/lib/gpuckpt/llm")
    assert "the process has ended" in sys.stdout.getvalue()
    assert sys.stderr.getvalue() == ""


def test_leave_running_says_so():
    assert "runs on" in result_lines(dump_report(process="running"))[0]


def test_restored_and_repaired():
    assert result_lines(restore_report())[0].startswith("restored 4242 (4 processes) from /var/lib/gpuckpt/llm")
    repaired = Report("restore", "ok", "running", {"root_pid": 4242, "pids": [4242], "duty": "resume"})
    assert result_lines(repaired) == ["repaired 4242 (1 process); the process runs on as before"]
    healthy = Report("restore", "ok", "running", {"root_pid": 4242, "pids": [4242], "duty": "nothing"})
    assert result_lines(healthy) == ["nothing to repair: 4242 (1 process) runs"]


def test_a_restore_that_left_something_does_not_say_that_nothing_is_left():
    def first(**state):
        error = errors.RestoreFailed("processes 4242 could not be ended", **state)
        return failure_lines(Report("restore", "failed", error.process, error=error), error, Manner())[0]

    assert first() == "gpuckpt: restore failed; nothing is left behind, the image is intact"
    assert first(process="frozen") == "gpuckpt: restore failed; the process is held and does not run"


def test_notes_of_the_run_are_said(capsys):
    report = dump_report(findings=())
    report.data["notes"] = ["an unfinished image was removed"]
    present(report, Manner(verbose=True))
    assert capsys.readouterr().err == "gpuckpt: note: an unfinished image was removed\n"


def test_warnings_are_lines_on_stderr(monkeypatch):
    use_terminals(monkeypatch)
    present(dump_report(), Manner())
    assert sys.stderr.getvalue().splitlines() == [PERSISTENCE]


def test_an_allowed_check_and_an_unknown_one_warn():
    unknown = replace(UNKNOWN, irreversible=False)
    report = dump_report(findings=(PASSING, replace(BLOCKING, allowed=True), unknown))
    allowed, not_known = warning_lines(report, Manner(verbose=True))
    assert "allowed by --allow" in allowed
    assert "nccl" in not_known


def test_quiet_says_nothing(monkeypatch):
    use_terminals(monkeypatch)
    present(dump_report(), Manner(quiet=True))
    assert sys.stdout.getvalue() + sys.stderr.getvalue() == ""


def test_silence_in_cron_and_words_on_request(capsys):
    present(dump_report(findings=(PASSING, NOTE, UNKNOWN)), Manner())
    assert capsys.readouterr() == ("", "")
    present(dump_report(), Manner())
    assert capsys.readouterr() == ("", f"{PERSISTENCE}\n")
    present(dump_report(), Manner(verbose=True))
    out, err = capsys.readouterr()
    assert out.startswith("dumped")
    assert err.startswith("gpuckpt: warning")


def test_a_failure_speaks_in_cron_and_with_quiet(capsys):
    failed = dump_report(outcome="failed", process="running", error=errors.DumpFailed("disk full", "free some"))
    assert present(failed, Manner(quiet=True)) == 30
    assert capsys.readouterr().err.splitlines() == [
        "gpuckpt: dump failed, the tree runs on as before",
        "  why: disk full",
        "  do:  free some",
    ]


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GpuckptError)]
)
def test_every_failure_has_a_first_line(kind):
    error = (
        kind(15, "why", process="frozen") if kind is errors.Interrupted else kind("why", "what to do", process="frozen")
    )
    lines = failure_lines(Report("dump", "failed", "frozen", error=error), error, Manner())
    assert lines[0].startswith("gpuckpt: ")
    assert ":" not in lines[0][len("gpuckpt:") :]
    assert "  why: why" in lines
    if kind is not errors.TreeHeld:
        assert "held and does not run" in lines[0]


def test_several_refusing_checks_are_all_shown():
    error = errors.Refused("two checks refuse")
    lines = failure_lines(process_report_refused(), error, Manner())
    assert lines[0] == "gpuckpt: dump refused; nothing was touched"
    text = "\n".join(lines)
    assert "tcp-outside: 10.0.0.1:41022" in text
    assert "nccl: maps of 4243 unreadable" in text
    assert "do: decide what becomes of it" in text
    assert "persistence-mode" not in text


def process_report_refused():
    return Report("dump", "refused", "untouched", findings=process_report().findings)


def test_a_plan_is_shown_without_a_terminal_and_says_why_once(capsys):
    report = dump_report(
        outcome="refused",
        process="untouched",
        data={"image": "/img", "root_pid": 4242},
        findings=process_report().findings,
        error=errors.Refused("x"),
    )
    assert present(report, Manner(dry_run=True)) == 20
    out, err = capsys.readouterr()
    assert "would be refused: 2 checks" in out
    assert "4242 to /img" in out
    for finding in report.findings:
        assert finding.id in out
    assert err == "gpuckpt: dump refused; nothing was touched\n"
    assert present(dump_report(outcome="planned", process="untouched"), Manner()) == 0
    assert "would go ahead" in capsys.readouterr().out


def show(what, stdout, **environment):
    code = f"""
import sys; sys.path.insert(0, {HERE!r})
import cli_samples as samples
from gpuckpt.cli.render import present
from gpuckpt.cli.manner import Manner
sys.exit(present({what}, Manner(verbose=True)))
"""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False, env=env
    )


def test_a_full_disk_under_stdout_does_not_change_the_status():
    with open("/dev/full", "w") as full:
        done = show("samples.dump_report(findings=())", full)
    assert done.returncode == 0
    assert b"could not be written to stdout" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_reader_that_went_away_is_no_failure():
    read, write = os.pipe()
    os.close(read)
    done = show("samples.image_report()", write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_stdout_that_is_closed():
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT}
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m gpuckpt dump --json >&-'],
        env=env,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2


def test_foreign_text_cannot_steer_the_terminal(capsys):
    error = errors.NotFound("name\x1b]0;owned\x07\r\n\u202etxt\udcff", "\x9b31m")
    present(Report("dump", "refused", "untouched", error=error), Manner())
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 3
    assert r"name\x1b]0;owned\x07\r\n\u202etxt\xff" in err
    assert not set(err) & set("\x1b\x07\r\u202e\x9b")


def test_ascii_streams_get_ascii(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(canvas, "speaks_unicode", lambda _stream: False)
    canvas.write(stream, "caf\u00e9 \u2026")
    assert stream.getvalue() == "caf\\xe9 ~"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "?"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (150 << 30, "150 GiB"),
        (18_600_000_000, "17.3 GiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_sizes(value, expected):
    assert words.size(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "?"),
        (0.0006, "0.6 ms"),
        (0.4, "0.40 s"),
        (15.93, "15.9 s"),
        (99.96, "100.0 s"),
        (200, "3 min 20 s"),
        (8040, "2 h 14 min"),
        (86400 * 3 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_durations(value, expected):
    assert words.duration(value) == expected


def test_moments():
    assert words.moment(0) == "1970-01-01 00:00:00 UTC"
    assert words.moment(1e30).endswith("s after 1970")
    assert words.moment(float("1e308")).endswith("s after 1970")

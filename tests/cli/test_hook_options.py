"""The options of hooks and of readiness: what arrives, what is refused, what the result line says."""

import pytest
from cli_samples import dump_report, restore_report

from gpuckpt.cli.manner import Manner
from gpuckpt.cli.render import result_lines, warning_lines
from gpuckpt.model.report import Finding, Report
from gpuckpt.model.requests import Hooks, Readiness


def test_hooks_arrive_and_an_empty_one_is_none(flow, gpuckpt, tmp_path):
    flow.answer = dump_report()
    file = tmp_path / "c.toml"
    file.write_text("[dump]\npre-dump = 'from the file'\npost-dump = 'p'\nhook-timeout = 5")
    file.chmod(0o600)
    argv = ("dump", "--tree", "7", str(tmp_path / "img"), "--config", str(file))
    gpuckpt(*argv)
    gpuckpt(*argv, "--pre-dump", "", "--post-dump", "curl x", "--hook-timeout", "9")
    assert [request.hooks for request in flow.requests] == [
        Hooks("from the file", "p", 5.0),
        Hooks(None, "curl x", 9.0),
    ]


def test_readiness_arrives(flow, gpuckpt):
    flow.answer = restore_report()
    argv = ["--ready-cmd", "c", "--ready-http", "https://[::1]:8443/h?x", "--ready-tcp", "[fe80::1%eth0]:80"]
    status, _, err = gpuckpt("restore", "img", *argv, "--ready-timeout", "9", "--cold-start-seconds", "94")
    assert (status, err) == (0, "")
    assert flow.request.readiness == Readiness("c", "https://[::1]:8443/h?x", ("fe80::1%eth0", 80), 9.0, 94.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--ready-http", url) for url in ("file:///etc/passwd", "ftp://h/", "h:80", "http://", "http://h:99999/")),
        *(("--ready-http", url) for url in ("http://h:x/", "http://[::1/", "http://h/a b", "http://h/\r\nX: y", "http://h:0/")),
        ("--ready-http", "http://me:secret@h/"),
        *(("--ready-tcp", text) for text in ("h", "80", ":80", "h:0", "h:65536", "::1:80", "h:8o", "[::1]", "a b:80")),
        ("--ready-timeout", "0"),
        ("--ready-timeout", "inf"),
        ("--hook-timeout", "0"),
        ("--cold-start-seconds", "-1"),
        ("--cold-start-seconds", "94"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(gpuckpt, flow, option, value):
    status, _, err = gpuckpt("restore", "img", option, value)
    assert (status, flow.requests) == (2, [])
    assert "secret" not in err


def test_a_repair_has_no_hooks(gpuckpt, flow):
    for option in ("--pre-restore", "--post-restore", "--ready-cmd"):
        assert gpuckpt("restore", "--tree", "7", option, "true")[0] == 2


@pytest.mark.parametrize(
    ("cold", "words"),
    [
        (None, "; ready after 6.10 s"),
        ({"seconds": 94.0, "factor": 94 / 6.1}, "; ready after 6.10 s; a cold start took 94.0 s: 15 x"),
        ({"seconds": 3.0, "factor": 3 / 6.1}, "; ready after 6.10 s; a cold start took 3.00 s: 0.5 x"),
    ],
)
def test_the_result_line_says_when_it_was_ready(cold, words):
    data = {"image": "/i", "root_pid": 7, "pids": [7], "ready_seconds": 6.1}
    data |= {"seconds": {"criu": 0.5, "ready": 5.0, "pre_restore": 9.0, "post_restore": 9.0}}
    data |= {"cold_start": cold} if cold else {}
    assert result_lines(Report("restore", "ok", "restored", data)) == [
        f"restored 7 (1 process) from /i in 0.50 s{words}"
    ]


def test_a_last_command_that_failed_is_said_to_cron_too():
    finding = Finding("post-dump", "fail", "warn", "it ends with 0", "exited with 7", "try it")
    report = Report("dump", "ok", "ended", {}, (finding,))
    assert warning_lines(report, Manner()) == [
        "gpuckpt: warning: post-dump: exited with 7 (expected: it ends with 0); try it"
    ]

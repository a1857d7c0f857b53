"""The options of a series, what they exclude, and the words of a run that nobody watches."""

import sys

import pytest
from cli_samples import dump_report

from gpuckpt.cli import seriesoptions
from gpuckpt.cli.manner import Manner
from gpuckpt.cli.render import present, result_lines
from gpuckpt.model.errors import Busy, DumpFailed
from gpuckpt.model.requests import DumpRequest, Into
from gpuckpt.model.series import MinFree, Rules

BUSY = Busy("gpuckpt dump (pid 7) has been working on the series /srv/job since 12:00:00", "wait for it to end")


def test_the_options_of_a_series_arrive(flow, gpuckpt, tmp_path, monkeypatch):
    flow.answer = dump_report()
    monkeypatch.chdir(tmp_path)
    argv = "dump --pid-file p --into s --name job --keep 3 --keep-within 7d --min-free 10% --no-base --full-every 2w"
    assert gpuckpt(*argv.split(), "--metrics-file", "m.prom")[0] == 0
    assert flow.request == DumpRequest(
        pid=0,
        image=tmp_path / "s",
        into=Into(
            tmp_path / "s",
            "job",
            Rules(3, 7 * 86400.0, MinFree(share=0.1)),
            use_base=False,
            full_every_seconds=14 * 86400.0,
        ),
        pid_file=tmp_path / "p",
        metrics_file=tmp_path / "m.prom",
    )


def test_a_series_without_options_keeps_all(flow, gpuckpt, tmp_path):
    flow.answer = dump_report()
    assert gpuckpt("dump", "--unit", "llm@1.service", "--into", str(tmp_path))[0] == 0
    assert flow.request == DumpRequest(pid=0, image=tmp_path, into=Into(tmp_path), unit="llm@1.service")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("img", "nothing says which process is meant"),
        ("img --tree 1 --pid-file f", "--tree and --pid-file are both given"),
        ("img --tree 1 --unit u", "--tree and --unit are both given"),
        ("img --pid-file f --unit u", "--pid-file and --unit are both given"),
        ("--tree 1", "nothing says where the image goes"),
        ("img --tree 1 --into d", "IMAGE and --into are both given"),
        ("--tree 1 --into d --base b", "--base and --into are both given"),
        ("img --tree 1 --name n", "--name is for a series"),
        ("img --tree 1 --keep 3", "--keep is for a series"),
        ("img --tree 1 --keep-within 1d", "--keep-within is for a series"),
        ("img --tree 1 --min-free 5%", "--min-free is for a series"),
        ("img --tree 1 --no-base", "--no-base is for a series"),
        ("img --tree 1 --full-every 1d", "--full-every is for a series"),
        ("img --tree 1 --push h:/d", "--push is for a series"),
        ("img --tree 1 --ssh-config f", "are for another host"),
        ("--tree 1 --into d --remote-command x", "are for another host"),
        ("--tree 1 --into d --push /here", "names no place on another host"),
        ("--tree 1 --into d --push h:/d --remote-command=", "--remote-command is empty"),
        *(
            (f"--tree 1 --into d --keep {bad}", "not a number from 1 on")
            for bad in ("0", "-1", "x", "1.5", "9" * 12, "٣")
        ),
        *(
            (f"--tree 1 --into d --keep-within {bad}", "no span of time")
            for bad in ("7", "0d", "7x", "-1d", "d", "1e3h", "nan")
        ),
        *(
            (f"--tree 1 --into d --min-free {bad}", "neither a share")
            for bad in ("0%", "100%", "0", "x", "-5G", "5X", "%")
        ),
        *((f"--tree 1 --into d --name {bad}", "is no name") for bad in (".x", "-x", "a/b", "x" * 101, "..")),
        ("--tree 1 --into d --name=", "is no name"),
        ("img --unit=", "no name of a systemd unit"),
        ("img --unit=-p", "no name of a systemd unit"),
        ("--tree 1 --into=", "a path is empty"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(flow, gpuckpt, argv, words):
    status, out, err = gpuckpt("dump", *argv.split())
    assert (status, out, flow.requests) == (2, "", [])
    assert words in err


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("24h", 86400), ("7d", 604800), ("90s", 90), ("2w", 1209600), ("1.5h", 5400)]
)
def test_spans(text, seconds):
    assert seriesoptions.span(text) == seconds


@pytest.mark.parametrize(
    ("text", "room"),
    [
        ("10%", MinFree(share=0.1)),
        ("0.5%", MinFree(share=0.005)),
        ("20G", MinFree(bytes=20 << 30)),
        ("20GiB", MinFree(bytes=20 << 30)),
        ("1.5t", MinFree(bytes=3 << 39)),
        ("512", MinFree(bytes=512)),
    ],
)
def test_rooms(text, room):
    assert seriesoptions.min_free(seriesoptions.room(text)) == room


def test_a_failure_of_a_series_is_one_line_in_cron(flow, gpuckpt, tmp_path):
    flow.answer = dump_report(outcome="refused", process="untouched", data={}, findings=(), error=BUSY)
    status, out, err = gpuckpt("dump", "--tree", "7", "--into", str(tmp_path))
    assert (status, out, err.count("\n")) == (22, "", 1)
    assert BUSY.message in err
    assert BUSY.hint in err


def test_several_refusals_are_one_line_too(capsys):
    failed = dump_report(outcome="failed", process="running", error=DumpFailed("disk full", "free some"))
    present(failed, Manner(one_line=True))
    assert capsys.readouterr().err == (
        "gpuckpt: dump failed, the tree runs on as before; disk full; do: free some\n"
    )  # fmt: skip


def test_at_a_terminal_it_has_its_three_lines(monkeypatch, capsys):
    monkeypatch.setattr("gpuckpt.cli.render.is_terminal", lambda stream: stream is sys.stderr)
    present(dump_report(outcome="failed", process="running", error=DumpFailed("disk full", "x")), Manner(one_line=True))
    assert capsys.readouterr().err.count("\n") == 3


def test_what_went_is_said():
    report = dump_report()
    data = {**report.data, "series": {"removed": ["a", "b"]}}
    assert "2 older images removed" in result_lines(dump_report(data=data))[0]
    assert "removed" not in result_lines(dump_report())[0]

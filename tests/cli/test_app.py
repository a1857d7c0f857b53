"""The command line: what becomes of options, of failures, and of the exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_samples import dump_report, host_report, restore_report

from gpuckpt.cli import failing
from gpuckpt.model.errors import (
    DumpFailed,
    ImageCorrupt,
    Interrupted,
    NotFound,
    Refused,
    TreeHeld,
    exit_status,
)
from gpuckpt.model.report import Event
from gpuckpt.model.requests import DumpRequest, InspectRequest, RepairRequest, RestoreRequest

KEYS = ["gpuckpt", "command", "outcome", "process", "data", "findings", "error"]


def program(*argv, **options):
    """The real program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-m", "gpuckpt", *argv], capture_output=True, timeout=60, check=False, **options
    )


def test_dump_options_arrive(flow, gpuckpt, tmp_path, monkeypatch):
    flow.answer = dump_report()
    monkeypatch.chdir(tmp_path)
    argv = "dump --tree 4242 img --leave-running --tcp keep --dry-run --allow a-1,b --allow c --keep-argv --timeout 9.5"
    monkeypatch.setattr("gpuckpt.checks.allow_error", lambda _ids: None)
    status, _, _ = gpuckpt(*argv.split(), "--lock-timeout", "7", "--settle", "0", "--use-cuda-program")
    assert status == 0
    assert flow.request == DumpRequest(
        pid=4242,
        image=tmp_path / "img",
        leave_running=True,
        tcp="keep",
        dry_run=True,
        allow=frozenset({"a-1", "b", "c"}),
        keep_argv=True,
        timeout_seconds=9.5,
        lock_timeout_seconds=7.0,
        settle_seconds=0.0,
        force_program=True,
    )


def test_dump_defaults_are_those_of_the_request(flow, gpuckpt, tmp_path):
    flow.answer = dump_report()
    gpuckpt("dump", "--tree", "7", str(tmp_path / "img"))
    assert flow.request == DumpRequest(pid=7, image=tmp_path / "img")


def test_restore_options_arrive(flow, gpuckpt, tmp_path, monkeypatch):
    flow.answer = restore_report()
    monkeypatch.chdir(tmp_path)
    gpuckpt(
        *[
            "restore",
            "img",
            "--wait",
            "--stdout",
            "o",
            "--stderr",
            "o",
            "--tcp",
            "close",
            "--gpu",
            "0=1",
            "--gpu",
            "1=0",
            "--timeout",
            "5",
            "--settle",
            "1",
        ]
    )
    assert flow.request == RestoreRequest(
        image=tmp_path / "img",
        wait=True,
        stdio={1: tmp_path / "o", 2: tmp_path / "o"},
        tcp="close",
        gpu_map={"0": "1", "1": "0"},
        timeout_seconds=5.0,
        settle_seconds=1.0,
    )


def test_namespaces_and_ports_arrive(flow, gpuckpt, tmp_path):
    flow.answer = restore_report()
    gpuckpt(*["restore", str(tmp_path), "--isolate", "pid,net", "--netns", "new", "--port", "80=81", "--port", "81=80"])
    assert flow.request == RestoreRequest(
        image=tmp_path, isolate=frozenset({"pid", "net"}), netns="new", ports={80: 81, 81: 80}
    )


def test_a_clone_arrives(flow, gpuckpt, tmp_path):
    flow.answer = restore_report()
    gpuckpt("restore", str(tmp_path), "--clone")
    assert flow.request == RestoreRequest(image=tmp_path, clone=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--isolate", "ipc"], "'ipc': there is no such namespace"),
        (["--isolate", ""], "'': there is no such namespace"),
        (["--netns", "a/b"], "'a/b': this is no name"),
        (["--netns", ""], "'': this is no name"),
        (["--port", "80"], "not of the form OLD=NEW"),
        (["--port", "80=0"], "not of the form OLD=NEW"),
        (["--port", "80=65536"], "not of the form OLD=NEW"),
        (["--port", "80=81=82"], "not of the form OLD=NEW"),
        (["--port", "80=90", "--port", "81=90"], "90 is named twice"),
        (["--port", "80=90", "--port", "80=91"], "80 is named twice"),
        (["--clone", "--overwrite-files"], "--clone changes no files"),
    ],
)
def test_wrong_namespaces_and_ports_are_wrong_usage(gpuckpt, tmp_path, words, said):
    status, _, err = gpuckpt("restore", str(tmp_path), *words)
    assert status == 2
    assert said in err


def test_restore_defaults_are_those_of_the_request(flow, gpuckpt, tmp_path):
    flow.answer = restore_report()
    gpuckpt("restore", str(tmp_path))
    assert flow.request == RestoreRequest(image=tmp_path)


def test_restore_tree_is_a_repair(flow, gpuckpt):
    flow.answer = restore_report(process="running")
    gpuckpt("restore", "--tree", "4242", "--timeout", "3", "--dry-run")
    assert flow.request == RepairRequest(pid=4242, timeout_seconds=3.0, dry_run=True)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["--tree", "5", "--keep-argv"], {"pid": 5, "keep_argv": True}),
        (["/", "--verify"], {"target": Path("/"), "verify": True}),
    ],
)
def test_inspect_targets(flow, gpuckpt, argv, expected):
    flow.answer = host_report()
    status, _, _ = gpuckpt("inspect", *argv)
    assert status == 0
    assert flow.request == InspectRequest(**expected)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "frobnicate",
        "--frobnicate",
        "push a b",
        "dump",
        "dump img",
        "dump --tree 12",
        "dump --tree 0 img",
        "dump --tree -5 img",
        "dump --tree 12x img",
        "dump --tree 99999999999 img",
        "dump --tree ١٢ img",
        "dump --tree 12 img more",
        "dump --tree 12 img --tcp maybe",
        "dump --tree 12 img --timeout nan",
        "dump --tree 12 img --timeout inf",
        "dump --tree 12 img --timeout -1",
        "dump --tree 12 img --timeout 0",
        "dump --tree 12 img --allow ,",
        "--quiet inspect",
        "dump --tree 12 img --settle soon",
        "restore",
        "restore img --tree 12",
        "restore --tree 12 --wait",
        "restore --tree 12 --stdout f",
        "restore img --tcp refuse",
        "restore img --gpu 0",
        "restore img --gpu =1",
        "restore img --gpu 0=1 --gpu 0=2",
        "restore img --gpu 0=1 --gpu 2=1",
        "inspect img --tree 12",
        "inspect --verify",
    ],
)
def test_wrong_usage_exits_2_in_words_and_in_json(flow, gpuckpt, line):
    status, out, err = gpuckpt(*line.split())
    assert (status, out) == (2, "")
    assert err.startswith(("gpuckpt: wrong usage\n  why: ", "Usage: gpuckpt"))
    assert "Traceback" not in err
    if line:
        status, out, err = gpuckpt(*line.split(), "--json")
        assert (status, err) == (2, "")
        envelope = json.loads(out)
        assert list(envelope) == KEYS
        assert envelope["error"]["code"] == "usage"
        assert envelope["process"] == "untouched"
    assert flow.requests == []


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("dump 4242 img", "gpuckpt dump --tree 4242 img"),
        ("dump 4242 --leave-running", "gpuckpt dump --tree 4242 --leave-running"),
        ("dump 4242", "gpuckpt dump --tree 4242 IMAGE"),
        ("migrate 4242 root@spare", "gpuckpt migrate --tree 4242 root@spare"),
        ("migrate 4242", "gpuckpt migrate --tree 4242 USER@HOST"),
    ],
)
def test_a_process_that_is_no_option_is_told_its_form(flow, gpuckpt, line, meant):
    status, out, err = gpuckpt(*line.split())
    assert (status, out) == (2, "")
    assert err.endswith(f"  do:  {meant}\n")


@pytest.mark.parametrize("line", ["dump img", "dump --tree 4242 7 8", "migrate root@spare", "dump 7 --pid-file f img"])
def test_other_mistakes_keep_their_words(flow, gpuckpt, line):
    status, _, err = gpuckpt(*line.split())
    assert status == 2
    assert " --tree 4242 " not in err
    assert "--tree 7" not in err


@pytest.mark.parametrize("option", ["--json", "--quiet", "-v"])
def test_an_option_before_the_command_is_told_its_place(flow, gpuckpt, option):
    status, out, err = gpuckpt(option, "inspect")
    assert status == 2
    assert f"put {option} after the command" in out + err


def test_an_empty_allow_is_wrong_usage(flow, gpuckpt):
    assert gpuckpt("restore", "img", "--allow", "")[0] == 2
    assert flow.requests == []


def test_empty_path_is_wrong_usage(flow, gpuckpt):
    assert gpuckpt("dump", "--tree", "1", "")[0] == 2
    assert gpuckpt("restore", "")[0] == 2
    assert gpuckpt("inspect", "")[0] == 2


def test_unknown_check_names_the_nearest(flow, gpuckpt):
    status, _, err = gpuckpt("dump", "--tree", "1", "img", "--allow", "io-urin")
    assert status == 2
    assert "did you mean io-uring?" in err
    flow.answer = dump_report()
    assert gpuckpt("dump", "--tree", "1", "img", "--allow", "disk-space")[0] == 0
    assert flow.request.allow == {"disk-space"}


@pytest.mark.parametrize(
    "error",
    [
        Refused("an image is there already", "name another directory"),
        NotFound("there is no process 4242"),
        DumpFailed("no space left", "free some"),
        TreeHeld("GPU 0 is full", "gpuckpt restore --tree 4242"),
        ImageCorrupt("criu/pages-1.img is cut", "copy it again"),
        Interrupted(signal.SIGTERM, "SIGTERM", process="running"),
    ],
)
@pytest.mark.parametrize("raised", [True, False])
def test_failures_raised_or_reported_come_out_the_same(flow, gpuckpt, error, raised):
    outcome = "refused" if 10 <= error.status < 30 else "failed"
    flow.answer = (
        error if raised else dump_report(outcome=outcome, process=error.process, error=error, data={}, findings=())
    )
    status, out, err = gpuckpt("dump", "--tree", "4242", "img")
    assert status == exit_status(error)
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("gpuckpt: ")
    assert lines[1] == f"  why: {error.message}"
    assert lines[2:] == ([f"  do:  {error.hint}"] if error.hint else [])
    status, out, err = gpuckpt("dump", "--tree", "4242", "img", "--json")
    assert (status, err) == (exit_status(error), "")
    envelope = json.loads(out)
    assert list(envelope) == KEYS
    assert (envelope["command"], envelope["outcome"], envelope["process"]) == ("dump", outcome, error.process)
    assert envelope["error"] == {"code": error.code, "message": error.message, "hint": error.hint}


def test_a_bug_has_a_traceback_and_claims_nothing_about_the_process(flow, gpuckpt):
    flow.answer = ZeroDivisionError("oops")
    status, out, err = gpuckpt("dump", "--tree", "4242", "img", "--json")
    assert status == 1
    assert "Traceback" in err
    envelope = json.loads(out)
    assert envelope["error"]["code"] == "internal"
    assert envelope["process"] is None
    status, out, err = gpuckpt("dump", "--tree", "4242", "img")
    assert (status, out) == (1, "")
    assert "Traceback" in err
    assert err.splitlines()[-2].startswith("  why: ZeroDivisionError: oops")


def test_wait_exits_with_the_status_of_the_job(flow, gpuckpt):
    flow.answer = restore_report()
    flow.answer.data["exit_status"] = 137
    assert gpuckpt("restore", "img", "--wait")[:2] == (137, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_around_the_flow_makes_no_claims(flow, gpuckpt, monkeypatch, number):
    """What a flow finds as the handler it puts back is the plain one: no words about what was touched."""
    seen = []
    flow.answer = dump_report()
    flow.dump = lambda _request, _listener: seen.append(signal.getsignal(number)) or flow.answer
    gpuckpt("dump", "--tree", "4242", "img")
    assert seen == [signal.SIG_DFL]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_flow_does_not_change_what_it_came_to(flow, gpuckpt, monkeypatch, number):
    """While the words are written, and while Python ends: a dump that has ended its job must not say 128+n."""
    from gpuckpt.cli import render

    flow.answer = dump_report()
    monkeypatch.setattr(render, "write", lambda *_: os.kill(os.getpid(), number))
    assert gpuckpt("dump", "--tree", "4242", "img")[0] == 0
    assert signal.getsignal(number) is signal.SIG_IGN


SIGNALLED = """
import os, signal, sys
import gpuckpt.cli.render as render
from gpuckpt.cli import session
from gpuckpt.cli.manner import Manner
from gpuckpt.model.report import Report
present = render.present
def late(report, manner):
    for name in sys.argv[2:]:
        os.kill(os.getpid(), signal.Signals[name])
    return present(report, manner)
render.present = late
sys.exit(session._shown(Manner(json=True), lambda listener: Report("dump", "ok", "ended", {"note": "x" * int(sys.argv[1])})))
"""


def signalled(size: int, *names: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", SIGNALLED, str(size), *names], stdout=subprocess.PIPE, env=env)


@pytest.mark.parametrize("names", [["SIGHUP"], ["SIGTERM", "SIGHUP"], ["SIGTERM", "SIGTERM"]])
def test_signals_before_the_report_is_written_do_not_swallow_it(names):
    """Two at once: to a process and to its group, or of a terminal that closes."""
    process = signalled(1, *names)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["process"] == "ended"


def test_a_report_that_nobody_takes_does_not_keep_a_signalled_run():
    """More than a pipe holds."""
    process = signalled(1 << 20, "SIGHUP")
    assert process.wait(60) == 0
    process.stdout.close()


def test_a_signal_that_is_wrapped_by_what_it_interrupts_is_no_bug():
    """Up to Python 3.11 what is raised while a class is made comes out as a RuntimeError."""
    wrapped = RuntimeError("Error calling __set_name__")
    wrapped.__cause__ = Interrupted(signal.SIGTERM, "interrupted", process="untouched")
    assert failing.as_expected(wrapped) is wrapped.__cause__
    assert failing.as_expected(RuntimeError("a bug")) is None


def test_nohup_stays(flow, gpuckpt):
    flow.answer = dump_report()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gpuckpt("dump", "--tree", "4242", "img")
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_an_early_signal_speaks_json(tmp_path):
    code = """
import os, signal, sys
import gpuckpt.cli.app as app
import gpuckpt.cli.dump as dump
dump.options.absolute.__globals__["Path"] = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["gpuckpt", "dump", "--tree", "1", "img", "--json"]
app.main()
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, env=env)
    assert done.returncode == 128 + signal.SIGTERM
    envelope = json.loads(done.stdout)
    assert (envelope["error"]["code"], envelope["process"]) == ("interrupted", "untouched")


def test_a_second_early_signal_is_no_bug(tmp_path):
    """It comes while the words about the first are written: the plain end, no traceback."""
    code = """
import os, signal, sys
import gpuckpt.cli.app as app
import gpuckpt.cli.dump as dump
import gpuckpt.cli.render as render
press = lambda *_: os.kill(os.getpid(), signal.SIGINT)
dump.options.absolute.__globals__["Path"] = render.write = press
sys.argv = ["gpuckpt", "dump", "--tree", "1", "img", "--json"]
app.main()
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_json_events_are_lines_on_stderr(flow, gpuckpt):
    flow.events = [Event("lock", "begin"), Event("lock", "end", seconds=0.5)]
    flow.answer = dump_report()
    status, out, err = gpuckpt("dump", "--tree", "4242", "img", "--json")
    assert status == 0
    assert [json.loads(line) for line in err.splitlines()] == [event.to_json() for event in flow.events]
    assert json.loads(out)["data"]["root_pid"] == 4242


def test_links_are_resolved_once_and_paths_are_absolute(flow, gpuckpt, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    flow.answer = dump_report()
    gpuckpt("dump", "--tree", "1", "link/../link/img")
    assert flow.request.image == tmp_path / "real" / "img"


def test_a_link_that_leads_in_circles_is_no_bug(flow, gpuckpt, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    flow.answer = NotFound("no image")
    assert gpuckpt("restore", str(tmp_path / "loop"))[0] == 21


def test_a_working_directory_that_is_gone(flow, gpuckpt, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        status, _, err = gpuckpt("dump", "--tree", "1", "img")
    finally:
        os.chdir(tmp_path)
    assert status == 21
    assert "use an absolute path" in err


def test_path_bytes_survive(flow, gpuckpt, tmp_path):
    name = os.fsdecode(b"im\xff\xfeage")
    flow.answer = NotFound(f"{tmp_path}/{name}: no image", "look")
    status, _, err = gpuckpt("restore", str(tmp_path / name))
    assert status == 21
    assert os.fsencode(flow.request.image) == os.fsencode(tmp_path) + b"/im\xff\xfeage"
    assert r"im\xff\xfeage: no image" in err
    _, out, _ = gpuckpt("restore", str(tmp_path / name), "--json")
    assert json.loads(out)["error"]["message"] == flow.answer.message


def test_real_program_with_odd_bytes_in_argv():
    done = program(b"restore", b"/nowhere/\xff\x1b[31m", b"--bad\xff")
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stderr


def test_stdout_of_the_job_may_be_the_pipe_we_were_given():
    code = "from gpuckpt.cli.restoreoptions import stream_file; import sys; sys.stderr.write(str(stream_file('/dev/stdout')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.startswith("/proc/")
    assert done.stderr.endswith("/fd/1")
    assert "self" not in done.stderr


def test_help_and_version():
    done = program("--help")
    assert done.returncode == 0
    for verb in ("dump", "inspect", "restore"):
        assert verb.encode() in done.stdout
        assert program(verb, "--help").returncode == 0
    assert b"--use-cuda-program" not in program("dump", "--help").stdout
    assert program("--version").stdout.startswith(b"gpuckpt ")
    nothing = program()
    assert (nothing.returncode, nothing.stdout) == (2, b"")


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}])
def test_no_environment_at_all(locale):
    done = program("dump", "--tree", "x\u00e9", "img", env=locale, cwd="/")
    assert done.returncode in (1, 2)

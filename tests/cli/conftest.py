"""A flow that never touches anything stands in for gpuckpt.flows.run: here only the words are tested."""

import sys
import types

import pytest


class FakeRun(types.ModuleType):
    """Records requests; answers with a report, or raises what it was told to."""

    def __init__(self) -> None:
        super().__init__("gpuckpt.flows.run")
        self.requests = []
        self.answer = None
        self.events = []

    def _act(self, request, listener):
        self.requests.append(request)
        for event in self.events:
            listener(event)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    dump = restore = repair = inspect = migrate = _act

    @property
    def request(self):
        assert len(self.requests) == 1
        return self.requests[0]


@pytest.fixture
def flow(monkeypatch):
    """The fake flow in place of the real one."""
    fake = FakeRun()
    package = types.ModuleType("gpuckpt.flows")
    package.run = fake
    monkeypatch.setitem(sys.modules, "gpuckpt.flows", package)
    monkeypatch.setitem(sys.modules, "gpuckpt.flows.run", fake)
    for name in ("dump", "restore", "repair", "describe", "migrating"):
        monkeypatch.setitem(sys.modules, f"gpuckpt.flows.{name}", fake)
    return fake


@pytest.fixture
def gpuckpt(monkeypatch, capsys):
    """Run a command line in this process: (status, stdout, stderr)."""
    import signal

    from gpuckpt.cli.app import main

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["gpuckpt", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)

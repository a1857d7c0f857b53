"""Fixtures of the transfer tests: one sshd for all, and directories that images may lie in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Answer, gpuckpt
from tests.sshd import REMOTE_COMMAND, Proxy, Sshd


@pytest.fixture(scope="session")
def sshd(tmp_path_factory):
    """A real sshd on loopback."""
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture
def proxy(sshd):
    """Makes proxies in front of the sshd; `config` names them as host `far`."""
    made: list[Proxy] = []

    def make(directory: Path, target: int | None = None, **traits) -> tuple[Proxy, Path]:
        one = Proxy(target or sshd.port, **traits)
        made.append(one)
        sshd.know(sshd.port, sshd.bare_port, *(other.port for other in made))
        return one, sshd.write_config({"far": one.port}, path=directory / f"config-{one.port}")

    yield make
    for one in made:
        one.close()
    sshd.know(sshd.port, sshd.bare_port)


def push(sshd: Sshd, image: Path, target: Path, *more: object, host: str = "far", config: Path | None = None) -> Answer:
    """Run `gpuckpt push` with the far side under test."""
    command = [] if host == "bare" else ["--remote-command", REMOTE_COMMAND]
    return gpuckpt("push", image, f"{host}:{target}", "--ssh-config", config or sshd.config, *command, *more)


def pull(sshd: Sshd, image: Path, target: Path, *more: object, host: str = "far", config: Path | None = None) -> Answer:
    """Run `gpuckpt pull` with the far side under test."""
    command = [] if host == "bare" else ["--remote-command", REMOTE_COMMAND]
    return gpuckpt("pull", f"{host}:{image}", target, "--ssh-config", config or sshd.config, *command, *more)

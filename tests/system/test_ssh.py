"""ssh as its users have it: host keys, agents, encrypted keys, jump hosts, sudo. The far side is a real sshd."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import time

import pytest

from gpuckpt.model.errors import MachineLacks, NotFound, Refused, TransferFailed
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system import invoker
from gpuckpt.system.links import LinkLost, Pace, Silent
from gpuckpt.system.ssh import Account, Caller, OwnSsh
from tests.harness import gpuckpt, wait_for
from tests.sshd import REMOTE_COMMAND, ssh_keygen

FAR_CERTIFIED = "@cert-authority *"


@pytest.fixture
def known(sshd):
    """Replaces the known hosts for a test."""

    def put(text: str) -> None:
        sshd.known_hosts.write_text(text)

    yield put
    sshd.know(sshd.port, sshd.bare_port)


def connect(sshd, *, config=None, host="far") -> None:
    """Connect and say hello, or raise why not."""
    SshStore(Caller(Account(host, config=config or sshd.config)), REMOTE_COMMAND).close()


def fingerprint(sshd) -> str:
    return ssh_keygen("-lf", sshd.directory / "host_key.pub").split()[1]


def test_known_hosts_in_all_their_forms(sshd, known):
    key, authority = sshd.host_key, " ".join((sshd.directory / "authority.pub").read_text().split()[:2])
    connect(sshd)
    for line in (
        f"[127.0.0.*]:* {key}",
        f"@cert-authority [127.0.0.1]:* {authority}",
        f"# x\n\n[127.0.0.1]:{sshd.port} {key} comment",
    ):
        known(line + "\n")
        connect(sshd)
    known(f"[127.0.0.1]:{sshd.port} {key}\n")
    ssh_keygen("-H", "-f", sshd.known_hosts)
    assert sshd.known_hosts.read_text().startswith("|1|")
    connect(sshd)


@pytest.mark.parametrize("strict", ["", "no", "accept-new"])
def test_an_unknown_key_is_refused_and_never_written_down(sshd, known, tmp_path, strict):
    known("")
    more = f"    StrictHostKeyChecking {strict}\n" if strict else ""
    config = sshd.write_config({"far": sshd.port}, more, tmp_path / "config")
    with pytest.raises(Refused, match="not known") as failure:
        connect(sshd, config=config)
    assert fingerprint(sshd) in failure.value.message
    assert f"ssh -o StrictHostKeyChecking=ask -F {config} far" in failure.value.hint
    assert sshd.known_hosts.read_text() == ""


def test_a_changed_key_is_refused_with_the_command_that_removes_the_old_one(sshd, known):
    other = " ".join((sshd.directory / "id.pub").read_text().split()[:2])
    known(f"[127.0.0.1]:{sshd.port} {other}\n")
    with pytest.raises(Refused, match="has changed") as failure:
        connect(sshd)
    assert fingerprint(sshd) in failure.value.message
    command = re.search(r"ssh-keygen -f .* -R .*$", failure.value.hint)
    subprocess.run(shlex.split(command[0]), check=True, capture_output=True)
    with pytest.raises(Refused, match="not known"):
        connect(sshd)


def test_a_revoked_key_is_refused_without_a_way_around(sshd, known):
    known(f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n@revoked * {sshd.host_key}\n")
    with pytest.raises(Refused, match="revoked") as failure:
        connect(sshd)
    assert "ssh-keygen" not in failure.value.hint
    assert "StrictHostKeyChecking" not in failure.value.hint


def test_a_refusal_ends_the_command_with_its_status(sshd, known, tmp_path):
    known("")
    done = gpuckpt("inspect", "far:", "--ssh-config", sshd.config)
    assert (done.status, done.error["code"], done.report["outcome"]) == (20, "refused", "refused")


def encrypted_key(sshd, tmp_path):
    key = tmp_path / "encrypted"
    shutil.copy(sshd.directory / "id", key)
    shutil.copy(sshd.directory / "id.pub", tmp_path / "encrypted.pub")
    ssh_keygen("-p", "-P", "", "-N", "open sesame", "-f", key)
    config = sshd.write_config({"far": sshd.port}, path=tmp_path / "config")
    config.write_text(config.read_text().replace(f"{sshd.directory}/id\n", f"{key}\n"))
    return key, config


def test_an_encrypted_key_without_a_terminal_asks_nobody(sshd, tmp_path):
    _key, config = encrypted_key(sshd, tmp_path)
    with pytest.raises(MachineLacks, match="Permission denied") as failure:
        connect(sshd, config=config)
    assert f"ssh -F {config} far true" in failure.value.hint


def test_an_agent_holds_the_key(sshd, tmp_path, monkeypatch):
    _key, config = encrypted_key(sshd, tmp_path)
    with agent_with(sshd.directory / "id", tmp_path) as agent:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
        connect(sshd, config=config)


@contextlib.contextmanager
def agent_with(key, place):
    """An agent that holds a key, listening in a directory."""
    path = place / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_for(path.exists, "the agent listens")
        env = {**os.environ, "SSH_AUTH_SOCK": str(path)}
        subprocess.run(["ssh-add", "-q", key], check=True, capture_output=True, env=env)
        yield path
    finally:
        agent.terminate()
        agent.wait(20)


def test_an_agent_that_the_configuration_names(sshd, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    _key, config = encrypted_key(sshd, tmp_path)
    with agent_with(sshd.directory / "id", tmp_path) as agent:
        config.write_text(config.read_text() + f"    IdentityAgent {agent}\n")
        connect(sshd, config=config)


def test_a_certificate_of_the_user(sshd, tmp_path):
    key = tmp_path / "own"
    ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", key)
    config = sshd.write_config({"far": sshd.port}, path=tmp_path / "config")
    config.write_text(config.read_text().replace(f"{sshd.directory}/id\n", f"{key}\n"))
    with pytest.raises(MachineLacks, match="Permission denied"):
        connect(sshd, config=config)
    ssh_keygen("-q", "-s", sshd.directory / "authority", "-I", "user", "-n", "root", f"{key}.pub")
    certificate = (tmp_path / "own-cert.pub").rename(tmp_path / "certificate")
    config.write_text(config.read_text() + f"    CertificateFile {certificate}\n")
    connect(sshd, config=config)


def test_a_proxy_jump(sshd, tmp_path):
    config = sshd.write_config({"jump": sshd.bare_port, "behind": sshd.port}, path=tmp_path / "config")
    text = config.read_text().replace("Host behind\n", "Host behind\n    ProxyJump jump\n")
    log = sshd.directory / "sshd.log"
    config.write_text(text)
    before = log.read_text().count("Accepted publickey")
    connect(sshd, config=config, host="behind")
    assert log.read_text().count("Accepted publickey") == before + 2


def test_a_jump_host_an_include_and_a_match(sshd, tmp_path):
    included = sshd.write_config({"jump": sshd.port}, path=tmp_path / "included")
    config = tmp_path / "config"
    config.write_text(
        f"Match host behind\n    ProxyCommand ssh -F {included} -W 127.0.0.1:{sshd.port} jump\n"
        f"    HostKeyAlias [127.0.0.1]:{sshd.port}\nInclude {included}\n"
    )
    connect(sshd, config=config, host="behind")


def test_hosts_that_are_not_there(sshd, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        config = sshd.write_config({"far": unused.getsockname()[1]}, path=tmp_path / "config")
        with pytest.raises(TransferFailed, match="refused"):
            connect(sshd, config=config)
    config.write_text("Host far\n    HostName no-such-host.invalid\n")
    with pytest.raises(NotFound, match=r"no-such-host.invalid"):
        connect(sshd, config=config)
    config.write_text("Host far\n    NoSuchOption yes\n")
    with pytest.raises(MachineLacks, match="configuration option"):
        connect(sshd, config=config)


def test_gcm_comes_first_and_only_what_the_user_allows(sshd, tmp_path):
    own = OwnSsh(Account("far", config=sshd.config))
    assert own.ciphers.split(",")[0].endswith("gcm@openssh.com")
    config = sshd.write_config(
        {"far": sshd.port}, "    Ciphers aes256-ctr,aes128-gcm@openssh.com\n", tmp_path / "config"
    )
    assert OwnSsh(Account("far", config=config)).ciphers == "aes128-gcm@openssh.com,aes256-ctr"


def test_silence_and_the_end_of_a_link(sshd):
    caller = Caller(Account("far", config=sshd.config))
    call = caller.run("sleep 30", poll_seconds=0.2)
    with pytest.raises(Silent):
        call.link.receive(1)
    call.close()
    with pytest.raises(LinkLost):
        call.link.receive(1)
    flood = caller.run("head -c 3000000 /dev/zero >&2; echo done")
    assert flood.link.receive(100) == b"done\n"
    assert flood.end()[0] == 0


def test_a_pace_is_kept():
    pace, begun = Pace(1 << 20), time.monotonic()
    for _ in range(10):
        pace.spend(1 << 15)
    assert time.monotonic() - begun > 0.25


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_under_sudo_ssh_runs_as_the_user_who_called_it(sshd, tmp_path, monkeypatch):
    uid = 65534
    for name in ("id", "known_hosts"):
        shutil.copy(sshd.directory / name, tmp_path / name)
        os.chown(tmp_path / name, uid, uid)
    os.chown(tmp_path, uid, uid)
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o711)
    config = tmp_path / "config"
    config.write_text(
        f"Host far\n    HostName 127.0.0.1\n    Port {sshd.port}\n    User root\n    IdentityFile {tmp_path}/id\n"
        f"    UserKnownHostsFile {tmp_path}/known_hosts\n"
        f"    ProxyCommand bash {tmp_path}/proxy\n"
    )
    script = f"id -u >{tmp_path}/who; exec 3<>/dev/tcp/127.0.0.1/{sshd.port}; cat <&3 & exec cat >&3\n"
    (tmp_path / "proxy").write_text(script)
    monkeypatch.setenv("SUDO_UID", str(uid))
    who = invoker.behind_sudo()
    assert (who.uid, who.environment["USER"]) == (uid, "nobody")
    connect(sshd, config=config)
    assert (tmp_path / "who").read_text() == f"{uid}\n"


@pytest.mark.parametrize("value", ["", "0", "x", "²", "99999999999999"])
def test_nobody_is_behind_it(monkeypatch, value):
    monkeypatch.setenv("SUDO_UID", value)
    assert invoker.behind_sudo() is None

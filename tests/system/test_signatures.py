"""Signatures by the real ssh-keygen: who may sign is taken, everybody and everything else is refused."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from gpuckpt.model.errors import NotFound, Refused
from gpuckpt.system import signatures
from tests.sshd import ssh_keygen

CONTENT = b'{\n "format": 1\n}\n'


@pytest.fixture
def keys(tmp_path):
    """`mine`, which `allowed` names as ops@cluster, and `other`."""
    for name in ("mine", "other"):
        ssh_keygen("-q", "-t", "ed25519", "-N", "", "-C", name, "-f", tmp_path / name)
    allow(tmp_path, f'ops@cluster namespaces="{signatures.NAMESPACE}"')
    return tmp_path


def allow(keys, options: str):
    public = (keys / "mine.pub").read_text()
    (keys / "allowed").write_text(f"{options} {public}")


def test_who_signed_is_named(keys):
    signature = signatures.sign(keys / "mine", CONTENT)
    signer = signatures.require_allowed(CONTENT, signature, keys / "allowed")
    fingerprint = ssh_keygen("-l", "-f", keys / "mine.pub").split()[1]
    assert signer == signatures.Signer(f"ED25519 {fingerprint}", "ops@cluster")
    assert signatures.key_of(CONTENT, signature) == signatures.Signer(f"ED25519 {fingerprint}")


def test_ssh_keygen_verifies_it_by_hand(keys):
    (keys / "sig").write_bytes(signatures.sign(keys / "mine", CONTENT))
    argv = ["ssh-keygen", "-Y", "verify", "-f", keys / "allowed", "-I", "ops@cluster", "-n", "gpuckpt-image"]
    done = subprocess.run([*argv, "-s", keys / "sig"], input=CONTENT, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr


def foreign(keys):
    """A signature with the same key for another purpose."""
    (keys / "file").write_bytes(CONTENT)
    ssh_keygen("-Y", "sign", "-n", "file", "-f", keys / "mine", keys / "file")
    return (keys / "file.sig").read_bytes()


@pytest.mark.parametrize(
    ("signature", "content", "why"),
    [
        (lambda keys: b"", CONTENT, "is not signed"),
        (lambda keys: signatures.sign(keys / "other", CONTENT), CONTENT, "its signer is not among them: ED25519"),
        (lambda keys: signatures.sign(keys / "mine", CONTENT), CONTENT + b" ", "does not fit the image"),
        (lambda keys: signatures.sign(keys / "mine", CONTENT)[:-80], CONTENT, "does not fit the image"),
        (lambda keys: os.urandom(300), CONTENT, "does not fit the image"),
        (foreign, CONTENT, "does not fit the image"),
    ],
    ids=["unsigned", "another key", "altered", "cut", "noise", "another namespace"],
)
def test_others_are_refused(keys, signature, content, why):
    with pytest.raises(Refused, match=re.escape(why)):
        signatures.require_allowed(content, signature(keys), keys / "allowed")


@pytest.mark.parametrize("options", ['ops namespaces="git"', 'ops valid-before="20200101"', "!ops"])
def test_what_the_list_says_of_a_key_holds(keys, options):
    allow(keys, options)
    with pytest.raises(Refused):
        signatures.require_allowed(CONTENT, signatures.sign(keys / "mine", CONTENT), keys / "allowed")


def test_patterns_and_several_names(keys):
    allow(keys, "*@cluster,root@*")
    assert signatures.require_allowed(CONTENT, signatures.sign(keys / "mine", CONTENT), keys / "allowed").principal


def test_a_list_that_others_can_write_is_not_believed(keys):
    (keys / "allowed").chmod(0o666)
    with pytest.raises(Refused, match="others can change who may sign"):
        signatures.require_allowed(CONTENT, b"any", keys / "allowed")
    with pytest.raises(NotFound):
        signatures.require_allowed(CONTENT, b"any", keys / "missing")


def test_a_key_with_a_passphrase_signs_through_an_agent_only(keys, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = keys / "locked"
    ssh_keygen("-q", "-t", "ed25519", "-N", "open sesame", "-f", key)
    with pytest.raises(Refused, match=r"cannot sign: .*passphrase"):
        signatures.require_usable(key)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", keys / "agent"], stdout=subprocess.PIPE, text=True)
    try:
        agent.stdout.readline()
        ask = keys / "ask"
        ask.write_text("#!/bin/sh\necho open sesame\n")
        ask.chmod(0o700)
        env = {**os.environ, "SSH_AUTH_SOCK": f"{keys}/agent", "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", key], env=env, check=True, timeout=30, stdin=subprocess.DEVNULL)
        monkeypatch.setenv("SSH_AUTH_SOCK", f"{keys}/agent")
        assert signatures.key_of(CONTENT, signatures.sign(keys / "locked.pub", CONTENT)) is not None
    finally:
        agent.terminate()
        agent.wait(30)
        agent.stdout.close()


@pytest.mark.parametrize("name", ["missing", "other.pub", "open"])
def test_a_key_that_cannot_sign_says_so(keys, monkeypatch, name):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (keys / "open").write_bytes((keys / "other").read_bytes())
    (keys / "open").chmod(0o644)
    (keys / "other").unlink()
    with pytest.raises((NotFound, Refused)) as failure:
        signatures.require_usable(keys / name)
    assert str(keys / name) in failure.value.message

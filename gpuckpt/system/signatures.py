"""Signatures of OpenSSH's kind (ssh-keygen -Y, PROTOCOL.sshsig), which say whose an image is.

All is done by ssh-keygen, which also asks an agent where only the public key is here. It never asks a
person: it runs without a terminal, so a key with a passphrase must be in an agent. Content and signature are
handed over in memory, so that what was looked at is what was verified.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from gpuckpt.model.errors import MachineLacks, NotFound, Refused
from gpuckpt.model.records import dataclass
from gpuckpt.system import commands, invoker, procfs
from gpuckpt.system.files import unsafe_places, user_of_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gpuckpt.system.commands import Completed

NAMESPACE = "gpuckpt-image"
"""What the signature is for: one made for a file, a commit or an e-mail with the same key is none of an image."""

MAX_BYTES = 16 << 10
"""Of a signature; one made with RSA 16384 has 6 KiB."""

SECONDS = 60.0
"""An agent may wait for a touch on a hardware key."""

_TRIAL = b"gpuckpt: can this key be used?\n"
_GOOD = re.compile(r'^Good "[^"]*" signature (?:for \S+ )?with (\S+) key (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Signer:
    """Who has signed."""

    key: str
    """The key's fingerprint: 'ED25519 SHA256:…'."""
    principal: str | None = None
    """As the list of allowed signers names the key's owner; None where no list was asked."""


def require_usable(key: Path) -> None:
    """Sign something with it. Raises NotFound, Refused, MachineLacks."""
    sign(key, _TRIAL)


def sign(key: Path, content: bytes) -> bytes:
    """The signature of `content`, armored. `key` is a private key, or a public one whose other half an agent has.

    Raises NotFound, Refused (no key, or one that cannot be used), MachineLacks (no ssh-keygen).
    """
    if not key.is_file():
        raise NotFound(f"{key}: no such key", "name an OpenSSH key: ssh-keygen -t ed25519 makes one")
    done = _keygen("sign", "-q", "-f", str(key), "-n", NAMESPACE, content=content)
    made = done.stdout.encode()
    if not done.ok or not made.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        raise Refused(
            f"{key} cannot sign: {_last_words(done)}",
            "where it has a passphrase, put it into an agent (ssh-add) and name its .pub file",
        )
    return made


def require_allowed(content: bytes, signature: bytes, allowed: Path) -> Signer:
    """Who has signed `content`, as the file `allowed` (allowed_signers of ssh-keygen(1)) names them.

    Raises Refused where nobody in it has, or others can change that file; NotFound, MachineLacks.
    """
    _require_safe(allowed)
    if not signature:
        raise Refused("the image is not signed", f"only images signed by one of {allowed} are taken")
    with _in_memory(allowed.read_bytes()) as listed, _in_memory(signature) as signed:
        files = ("-f", _path(listed), "-s", _path(signed))
        found = _keygen("find-principals", *files, content=b"", files=(listed, signed))
        names = [name for line in found.stdout.splitlines() for name in line.split(",") if name[:1] not in ("", "!")]
        for name in names if found.ok else ():
            done = _keygen("verify", *files, "-I", name, "-n", NAMESPACE, content=content, files=(listed, signed))
            seen = _GOOD.search(done.stdout) if done.ok else None
            if seen is not None:
                return Signer(f"{seen[1]} {seen[2]}", name)
    key = key_of(content, signature)
    why = "its signature does not fit the image" if key is None else f"its signer is not among them: {key.key}"
    raise Refused(
        f"the image is not signed by one of {allowed}: {why}",
        "do not restore it, or ask who made it; who is allowed stands there as `NAME ssh-ed25519 AAAA…`, one a line",
    )


def require_ready(allowed: Path) -> None:
    """Raises NotFound or Refused for a list that is not to be believed, MachineLacks without ssh-keygen."""
    _require_safe(allowed)
    _program()


def key_of(content: bytes, signature: bytes) -> Signer | None:
    """The key that has signed `content`, whoever owns it; None where it does not fit. Raises MachineLacks."""
    with _in_memory(signature) as signed:
        done = _keygen("check-novalidate", "-n", NAMESPACE, "-s", _path(signed), content=content, files=(signed,))
    seen = _GOOD.search(done.stdout) if done.ok else None
    return None if seen is None else Signer(f"{seen[1]} {seen[2]}")


def _require_safe(allowed: Path) -> None:
    if not allowed.is_file():
        raise NotFound(f"{allowed}: no such list of signers", "write one: ssh-keygen(1), ALLOWED SIGNERS")
    unsafe = unsafe_places(allowed, user_of_files())
    if unsafe:
        raise Refused(f"others can change who may sign: {unsafe[0]}", "name a list that only root or you can write to")


def _program() -> Path:
    program = commands.find_program("ssh-keygen")
    if program is None:
        raise MachineLacks("ssh-keygen was not found: it makes and verifies signatures", "install OpenSSH's client")
    return program


def _keygen(action: str, *arguments: str, content: bytes, files: Sequence[int] = ()) -> Completed:
    program = _program()
    with _in_memory(content) as descriptor:
        return commands.run(
            [str(program), "-Y", action, *arguments],
            timeout=SECONDS,
            extra_environment=_agent(),
            stdin=descriptor,
            pass_fds=files,
            # Without a terminal of its own it cannot stop us by asking for a passphrase there.
            new_session=True,
        )


def _agent() -> dict[str, str]:
    """Where the agent listens: sudo drops the variable, and the agent is that of whoever called it."""
    person = invoker.behind_sudo()
    known = {**os.environ, **(person.environment if person is not None else {})}
    return {name: known[name] for name in ("SSH_AUTH_SOCK",) if name in known}


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """A file that is nowhere but in memory."""
    descriptor = os.memfd_create("gpuckpt", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _path(descriptor: int) -> str:
    """Its name for a program that is started with it, also as another user than files take this process for."""
    return str(procfs.inherited_path(descriptor))


def _last_words(done: Completed) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else done.describe()

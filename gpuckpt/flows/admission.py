"""Whose images are taken: the signature of a manifest is judged before anything of it is parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuckpt.system import signatures

if TYPE_CHECKING:
    from pathlib import Path

    from gpuckpt.system.signatures import Signer


@dataclass(slots=True)
class Admission:
    """Lets images of allowed signers pass (an `Admit` of stores/directory.py), and remembers who it was."""

    allowed: Path
    """OpenSSH's allowed_signers."""
    signer: Signer | None = None

    @classmethod
    def of(cls, allowed: Path | None) -> Admission | None:
        """None where every image may pass."""
        return None if allowed is None else cls(allowed)

    def require_ready(self) -> None:
        """Raises what no image is to blame for, before one is opened: NotFound, Refused, MachineLacks."""
        signatures.require_ready(self.allowed)

    def __call__(self, raw_manifest: bytes, signature: bytes) -> None:
        """Raises Refused for a manifest that nobody has signed who may, NotFound, MachineLacks."""
        self.signer = signatures.require_allowed(raw_manifest, signature, self.allowed)

    def report(self) -> dict[str, Any]:
        """Who it was."""
        return _in_words(self.signer)


def signed_by(raw_manifest: bytes, signature: bytes, admission: Admission | None) -> dict[str, Any] | None:
    """For a report: key and principal (None where no list was given), both None for a signature that does not fit.

    None where there is no signature. Raises MachineLacks.
    """
    if not signature:
        return None
    signer = admission.signer if admission is not None else signatures.key_of(raw_manifest, signature)
    return _in_words(signer)


def _in_words(signer: Signer | None) -> dict[str, Any]:
    return {"key": signer.key if signer else None, "principal": signer.principal if signer else None}

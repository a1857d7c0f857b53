"""Every failure a user can meet: a class with a stable code, an exit status and a remedy.

The classes are the source of the manual's table of exit statuses. `process` says what became of the
user's processes and is one of the words of the JSON envelope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from gpuckpt.model.report import Finding

ProcessState = Literal["running", "ended", "restored", "frozen", "gone", "untouched"]

LOST: tuple[ProcessState, ...] = ("frozen", "gone")
"""Of a tree that may not come back by itself: its images are needed."""


class GpuckptError(Exception):
    """Base of all expected failures. `message` says what and why, `hint` what to do next."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 1
    meaning: ClassVar[str] = "a bug in gpuckpt"
    process: ProcessState = "untouched"
    findings: tuple[Finding, ...] = ()
    """What the checks had said before it failed."""

    def __init__(self, message: str, hint: str = "", *, process: ProcessState | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if process is not None:
            self.process = process


class UsageError(GpuckptError):
    """The command line asks for something that makes no sense."""

    code = "usage"
    status = 2
    meaning = "wrong usage"


class MachineLacks(GpuckptError):
    """This machine lacks a privilege, a program or a driver."""

    code = "machine-lacks"
    status = 10
    meaning = "this machine lacks something: privilege, CRIU, driver"


class Refused(GpuckptError):
    """A check refused; nothing was touched."""

    code = "refused"
    status = 20
    meaning = "a check refused; nothing was touched"


class NotFound(GpuckptError):
    """No such process, image or path."""

    code = "not-found"
    status = 21
    meaning = "no such process, image or host path"


class Busy(GpuckptError):
    """Another gpuckpt works on this tree or image."""

    code = "busy"
    status = 22
    meaning = "another gpuckpt works on this tree or image"


class DumpFailed(GpuckptError):
    """The dump failed and the tree was seen running as before."""

    code = "dump-failed"
    status = 30
    meaning = "dump failed, the tree runs on as before"
    process: ProcessState = "running"


class TreeHeld(GpuckptError):
    """The dump failed, or a resume is not possible yet, and the tree or a part of it does not run."""

    code = "tree-held"
    status = 31
    meaning = "the tree, or part of it, does not run"
    process: ProcessState = "frozen"


class RestoreFailed(GpuckptError):
    """The restore failed; nothing is left behind and the image is intact."""

    code = "restore-failed"
    status = 40
    meaning = "restore failed; nothing is left behind, the image is intact"
    process: ProcessState = "untouched"


class RestoredUnhealthy(GpuckptError):
    """The tree was restored but died, is not on its GPU or is not ready."""

    code = "restored-unhealthy"
    status = 41
    meaning = "restored, but not healthy"
    process: ProcessState = "gone"


class TransferFailed(GpuckptError):
    """A transfer broke off; the same command continues it."""

    code = "transfer-failed"
    status = 50
    meaning = "transfer failed; the same command continues it"


class GoUnanswered(GpuckptError):
    """A migration's `go` was sent, and nobody knows whether the job runs on the other host."""

    code = "go-unanswered"
    status = 51
    meaning = "the other host did not answer `go`; the job is held and does not run here"
    process: ProcessState = "frozen"


class ImageCorrupt(GpuckptError):
    """The image is incomplete or corrupt; the message names the part."""

    code = "image-corrupt"
    status = 60
    meaning = "image incomplete or corrupt"


class ImageTooNew(GpuckptError):
    """The image was made in a newer format."""

    code = "image-too-new"
    status = 61
    meaning = "image made by a newer format"


class Interrupted(GpuckptError):
    """A signal ended the operation, after the unwind; everything runs as before."""

    code = "interrupted"
    status = 128
    meaning = "128+n: ended by signal n, after the unwind"

    def __init__(self, signal_number: int, message: str, *, process: ProcessState) -> None:
        super().__init__(message, process=process)
        self.signal_number = signal_number


def in_words(error: BaseException) -> str:
    """What an exception says to a person: an OSError without its number, with its file in front."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def exit_status(error: GpuckptError) -> int:
    """The exit status for an error (128+n for a signal)."""
    if isinstance(error, Interrupted):
        return 128 + error.signal_number
    return error.status

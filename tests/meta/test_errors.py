"""Codes and exit statuses are a contract: each is taken once, and they keep to their ranges."""

import signal

from gpuckpt.model import errors
from gpuckpt.model.errors import GpuckptError, Interrupted, exit_status, in_words

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GpuckptError)]


def test_codes_and_statuses_are_unique():
    for attribute in ("code", "status", "meaning"):
        values = [getattr(kind, attribute) for kind in KINDS]
        assert len(values) == len(set(values)), attribute
        assert all(values)


def test_statuses_are_the_published_ones():
    assert {kind.code: kind.status for kind in KINDS} == {
        "internal": 1,
        "usage": 2,
        "machine-lacks": 10,
        "refused": 20,
        "not-found": 21,
        "busy": 22,
        "dump-failed": 30,
        "tree-held": 31,
        "restore-failed": 40,
        "restored-unhealthy": 41,
        "transfer-failed": 50,
        "go-unanswered": 51,
        "image-corrupt": 60,
        "image-too-new": 61,
        "interrupted": 128,
    }


def test_a_signal_is_128_and_its_number():
    assert exit_status(Interrupted(signal.SIGTERM, "SIGTERM", process="running")) == 143


def test_an_oserror_is_said_without_its_number():
    assert in_words(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"
    assert in_words(OSError(28, "No space left on device")) == "No space left on device"
    assert in_words(TimeoutError("the driver did not answer")) == "the driver did not answer"

"""Settings of the whole host that gpuckpt changes for a while: what they are now, and their change.

owner/hostchanges.py says who wants a change and when it is put back; here a value is only read or written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os

from gpuckpt.model.records import dataclass

F_SETPIPE_SZ = 1031
"""include/uapi/linux/fcntl.h; in Python's fcntl from 3.10 on, but not in its type stubs."""

LARGEST_PIPE = 1 << 31
"""The kernel takes no larger one (fs/pipe.c, round_pipe_size)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting and the file that is it."""

    name: str
    """For file names."""
    words: str
    path: str


HUGE_PAGES = Setting("huge-pages", "transparent huge pages", "/sys/kernel/mm/transparent_hugepage/enabled")
"""'always', 'madvise' or 'never' (Documentation/admin-guide/mm/transhuge.rst)."""
PIPE_SIZE = Setting("pipe-max-size", "fs.pipe-max-size", "/proc/sys/fs/pipe-max-size")
"""Bytes that a pipe may hold without CAP_SYS_RESOURCE (pipe(7))."""
SETTINGS = (HUGE_PAGES, PIPE_SIZE)


def read(setting: Setting) -> str:
    """Its value now; of several words the chosen one. Raises OSError, also where this kernel has no such setting."""
    with open(setting.path, encoding="utf-8") as file:  # noqa: PTH123 - a path as text
        text = file.read()
    return (chosen(text) or "") if "[" in text else text.strip()


def chosen(text: str) -> str | None:
    """The chosen word of 'always [madvise] never'."""
    return next((word[1:-1] for word in text.split() if word.startswith("[")), None)


def write(setting: Setting, value: str) -> None:
    """Change it. Raises OSError."""
    descriptor = os.open(setting.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())  # in one call: the kernel takes each for a whole value
    finally:
        os.close(descriptor)


def is_enough(value: str, wanted: str) -> bool:
    """Whether a value serves as well as the wanted one: a number may be larger, a word must be the same."""
    return int(value) >= int(wanted) if value.isdigit() and wanted.isdigit() else value == wanted


def makes_large_pages() -> bool:
    """Whether the kernel gives any mapping pages larger than the smallest, without being asked."""
    directory = os.path.dirname(HUGE_PAGES.path)  # noqa: PTH120
    for path in (HUGE_PAGES.path, *glob.glob(f"{directory}/hugepages-*/enabled")):  # noqa: PTH207
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:  # noqa: PTH123
            if chosen(file.read()) == "always":
                return True
    return False


def gives_huge_pages_if_asked() -> bool:
    """Whether a mapping gets huge pages by madvise(2), and only by it."""
    try:
        return read(HUGE_PAGES) == "madvise"
    except OSError:
        return False


def pipes_are_limited() -> bool:
    """Whether fs.pipe-max-size binds this process: root lacks CAP_SYS_RESOURCE in most containers.

    Tried, for in a user namespace the capability that /proc shows does not count.
    """
    try:
        wanted = int(read(PIPE_SIZE)) * 2
    except (OSError, ValueError):
        return False
    ends = os.pipe()
    try:
        fcntl.fcntl(ends[1], F_SETPIPE_SZ, min(wanted, LARGEST_PIPE))
    except OSError as error:
        return error.errno == errno.EPERM
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)
    return False

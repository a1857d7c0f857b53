"""CRIU's log, read for a person: why it failed, and what to do.

CRIU's exit status is 1 for nearly every cause, so that its text is the only source. The rules:

1. The log, standard output and standard error are read; that there is no log is itself a finding.
2. Lines are dropped that successful runs have too, and lines that only follow another error.
3. The first `Error` line that is left is the cause; an error of the code inside the process (`pie:`)
   beats a later "Can't …".
4. If nothing is left, the dropped lines and the warnings are looked at; if nothing fits there either,
   the end of the log is shown and nothing is claimed.

What is known stands in criu_causes/.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.model.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpuckpt.system.criu_causes.row import Row

    DeviceNames = Callable[[int, int], str | None]

READ_BYTES = 4 << 20
"""A hung restore writes 6 MB of log a second (seen with 4.2.1 and cut pages): never read a log whole."""
_HEAD_BYTES = READ_BYTES - (1 << 20)
_TAIL_LINES = 20
_LOOK_AT = 1000
"""Errors, and warnings, that are looked at: one cause can be repeated without end."""
_LINE_CHARACTERS = 1000
_VALUE_CHARACTERS = 300

BENIGN = re.compile(
    r"""rlimit: Can't setup RLIMIT_NOFILE for self
    |Will restore \d+ with interrupted system call
    |irmap: Can't stat /no-such-path
    |Unable to interrupt task: \d+ \(Operation not permitted\)
    |Clocks values have not been dumped
    |--network-lock will be ignored in restore command
    |Warn .*Can't link .*\.cr\.\w+\.ghost -> """.replace("\n    ", "")
)
"""These lines occur in runs that succeed."""

FOLLOWING = re.compile(
    r"""Dumping FAILED\.
    |Restoring FAILED\.
    |Dump files \(pid: \d+\) failed with -1
    |Collect mappings \(pid: \d+\) failed with -1
    |Dump mappings \(pid: \d+\) failed with -1
    |Unable to open fd=
    |`?- Can't open vma
    |\d+ exited, status=1\b
    |\d+ killed by signal 9\b
    |cgroupd: recv req error
    |Unable to detach from \d+: No such process
    |Restorer fail \d+""".replace("\n    ", "")
)
"""These lines follow another error and explain nothing."""

_ERROR = re.compile(r"\bError \([^)]*\):")
_ERROR_MARK, _WARNING_MARK = "Error (", "Warn  ("
_PIE = re.compile(r"^(?:\(\d+\.\d+\) +)?pie: ")
_CANNOT = re.compile(r"\): (?:\w+: )?Can't ")
_RUN_ID = re.compile(r"^(?:\(\d+\.\d+\) )?CRIU run id = ([0-9A-Za-z-]{8,64})\s*$", re.MULTILINE)
_SUCCESS = re.compile(
    r"^\(\d+\.\d+\) (?:(?:Pre-d|D)umping finished successfully|Restore finished successfully\. Tasks resumed\.)\s*$",
    re.MULTILINE,
)
_DEVICE = re.compile(r"\(chr (\d+):(\d+)\)")
_RUN_ID_CHARACTERS = 4096

_STATUS_WORDS = {
    0: "did its part",
    1: "failed",
    134: "aborted (it found a bug in itself or in the image)",
    139: "crashed",
    137: "was killed from outside (SIGKILL)",
    143: "was killed from outside (SIGTERM)",
    130: "was killed from outside (SIGINT)",
    129: "was killed from outside (SIGHUP)",
}
_CRASHES = (134, 139)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why CRIU failed, for a person. All texts are empty when there is nothing to explain."""

    cause: str
    remedy: str
    line: str
    """The line that says so, as CRIU wrote it; the last 20 lines where none does."""
    known: bool
    """The cause comes from the table. When False, `cause` repeats CRIU's own words."""
    id: str = ""
    """The row of the table: a stable word for programs and tests."""


def read_log(path: str | os.PathLike[str]) -> str:
    """The text of a log, or its beginning and its end when it is larger than READ_BYTES; '' if there is none."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(READ_BYTES + 1)
            if len(head) > READ_BYTES:
                file.seek(_HEAD_BYTES - READ_BYTES, os.SEEK_END)
                head = head[:_HEAD_BYTES] + b"\n[...]\n" + file.read(READ_BYTES - _HEAD_BYTES)
    except FileNotFoundError:
        return ""
    return head.decode("utf-8", "surrogateescape")


def run_id(log: str) -> str | None:
    """CRIU's id of this run, from the first lines of a log (or of its standard error).

    It stands in the name of the nftables table of a dump (see netfilter.delete_criu_tables). At a restore
    the table bears the id of the dump, which stands in inventory.img, not this one.
    """
    found = _RUN_ID.search(log[:_RUN_ID_CHARACTERS])
    return found.group(1) if found else None


def finished(log: str) -> bool:
    """CRIU wrote that it succeeded. False for a failure and for a log that breaks off."""
    return _SUCCESS.search(log) is not None


def status_words(status: int) -> str:
    """What became of CRIU, for its exit status (128 + n and -n both mean signal n)."""
    status = 128 - status if status < 0 else status
    return _STATUS_WORDS.get(status, f"ended with status {status}")


def error_lines(text: str) -> tuple[str, ...]:
    """The error lines that may be a cause, in order, an error inside a process before a later "Can't …"."""
    kept = [line for line in _marked(text, _ERROR_MARK) if not _dropped(line)]
    inside = next((line for line in kept if _PIE.match(line)), None)
    if inside is not None and _CANNOT.search(kept[0]):
        kept.remove(inside)
        kept.insert(0, inside)
    return tuple(kept)


def _dropped(line: str) -> bool:
    return BENIGN.search(line) is not None or FOLLOWING.search(line) is not None


def _marked(text: str, mark: str) -> Iterator[str]:
    """The first lines that hold `mark`; the others of a long log are not even split."""
    position = text.find(mark)
    for _ in range(_LOOK_AT):
        if position < 0:
            return
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        yield _shown(text[text.rfind("\n", 0, position) + 1 : end])
        position = text.find(mark, end)


def _lines(text: str) -> Iterator[str]:
    return (_shown(line) for line in text.split("\n") if line.strip())


def _shown(line: str) -> str:
    """A line of bounded length without control characters: it is shown on terminals."""
    cut = line[:_LINE_CHARACTERS]
    return cut if cut.isprintable() else "".join(map(_visible, cut))


def _visible(character: str) -> str:
    if character == "\t":
        return " "
    return "?" if ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 else character


def explain(log: str, stdout: str, stderr: str, status: int, *, device_name: DeviceNames | None = None) -> Explanation:
    """Why CRIU failed.

    `log` is the text of its log file ('' if it wrote none), `status` its exit status (-n or 128 + n for
    signal n). `device_name` turns major and minor number into a name, or None. Status 0 explains nothing.
    """
    if status == 0:
        return Explanation("", "", "", known=False)
    text = log if log.strip() else f"{stderr}\n{stdout}"
    found = (
        _match(error_lines(text) if log.strip() else _said(text), text, device_name)
        or _match(_second_look(text), text, device_name)
        or _from_the_end(text, status)
        or _unknown(text, status)
    )
    return found if log.strip() else _without_log(found)


def _said(text: str) -> tuple[str, ...]:
    """What CRIU wrote before it had a log: errors first, then everything else."""
    errors = error_lines(text)
    return errors + tuple(line for line in _lines(text[:READ_BYTES]) if line not in errors)


def _second_look(text: str) -> Iterator[str]:
    yield from filter(_dropped, _marked(text, _ERROR_MARK))
    yield from _marked(text, _WARNING_MARK)


def _match(lines: Iterable[str], text: str, device_name: DeviceNames | None) -> Explanation | None:
    """The first line that a row fits."""
    from gpuckpt.system import criu_causes  # noqa: PLC0415  a hundred patterns, and only a failure needs them

    for line in lines:
        named = _with_device_names(line, device_name)
        for row in criu_causes.ROWS:
            values = _fits(row, named, text)
            if values is not None:
                return _explanation(row, values, line)
    return None


def _fits(row: Row, line: str, text: str) -> dict[str, str] | None:
    found = row.pattern.search(line)
    if found is None:
        return None
    also = row.also.search(text) if row.also is not None else None
    if row.also is not None and also is None:
        return None
    values = {**(also.groupdict() if also else {}), **found.groupdict()}
    return {name: _value(name, value) for name, value in values.items()}


def _value(name: str, value: str | None) -> str:
    if not value or value == "(null)":
        return "unnamed" if name in ("name", "peer") else ""
    if name in ("path", "target") and not value.startswith("/"):
        value = f"/{value}"  # restore prints paths relative to the root directory it opened
    return "".join(map(_visible, value[:_VALUE_CHARACTERS].strip()))


def _explanation(row: Row, values: dict[str, str], line: str) -> Explanation:
    filled = defaultdict(str, values)
    cause, remedy = (" ".join(words.format_map(filled).split()) for words in (row.cause, row.remedy))
    return Explanation(cause, remedy, line.strip(), known=True, id=row.id)


def _with_device_names(line: str, device_name: DeviceNames | None) -> str:
    """'(chr 10:229)' becomes '(chr 10:229 /dev/fuse)' where the name is known."""
    found = _DEVICE.search(line)
    name = device_name(int(found[1]), int(found[2])) if found and device_name else None
    return line if found is None or not name else line.replace(found[0], f"{found[0][:-1]} {name})")


def _from_the_end(text: str, status: int) -> Explanation | None:
    """No line says why: CRIU crashed or was killed, perhaps because it did not end by itself."""
    from gpuckpt.system import criu_causes  # noqa: PLC0415

    signal_status = 128 - status if status < 0 else status
    if signal_status <= 128 or error_lines(text):
        return None
    last = next(reversed(list(_lines(text[-10_000:]))), "")
    if signal_status in _CRASHES:
        return _explanation(criu_causes.CRASHED, {}, last)
    for row in criu_causes.LAST_LINE_ROWS:
        values = _fits(row, last, text)
        if values is not None:
            return _explanation(row, values, last)
    return _explanation(criu_causes.KILLED, {}, last)


def _unknown(text: str, status: int) -> Explanation:
    remedy = "see CRIU's log for what came before"
    errors = error_lines(text)
    if errors:
        message = _ERROR.split(errors[0], maxsplit=1)[-1].strip()
        return Explanation(f"CRIU says: {message}", remedy, errors[0].strip(), known=False)
    last = list(_lines(text[-_LINE_CHARACTERS * _TAIL_LINES :]))[-_TAIL_LINES:]
    cause = f"CRIU {status_words(status)} and gave no reason" + (": these are its last lines" if last else "")
    return Explanation(cause, f"{remedy}; verify the image if this was a restore", "\n".join(last), known=False)


def _without_log(found: Explanation) -> Explanation:
    return Explanation(f"{found.cause} (CRIU wrote no log)", found.remedy, found.line, found.known, found.id)

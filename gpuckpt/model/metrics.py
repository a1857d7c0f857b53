"""Prometheus text about runs, for the textfile collector of node_exporter.

https://github.com/prometheus/docs/blob/main/docs/instrumenting/exposition_formats.md: in a label value backslash,
quote and newline are escaped. One file can hold the runs of several commands and jobs, told apart by their labels;
a run replaces its own figures and counts on from those that were there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field

from gpuckpt.model.records import dataclass

FAMILIES: dict[str, tuple[str, str]] = {
    "gpuckpt_last_run_timestamp_seconds": ("gauge", "When the last run ended, in seconds since 1970."),
    "gpuckpt_last_run_exit_status": ("gauge", "Exit status of the last run; 0 is success."),
    "gpuckpt_last_success_timestamp_seconds": ("gauge", "When the last successful run ended, in seconds since 1970."),
    "gpuckpt_runs_total": ("counter", "Runs that were begun."),
    "gpuckpt_runs_failed_total": ("counter", "Runs that did not succeed."),
    "gpuckpt_frozen_seconds": ("gauge", "How long the job stood still in the last successful run."),
    "gpuckpt_phase_seconds": ("gauge", "How long each phase of the last successful run took."),
    "gpuckpt_image_raw_bytes": ("gauge", "Memory in the image of the last successful run."),
    "gpuckpt_image_stored_bytes": ("gauge", "Size of the image of the last successful run."),
    "gpuckpt_image_shared_bytes": ("gauge", "Of that, what is shared with older images."),
}
"""Name -> kind and help: the same in every file, as the collector demands."""

_OF_SUCCESS = tuple(name for name in FAMILIES if "_last_" not in name and not name.endswith("_total"))
_SAMPLE = re.compile(r"(?P<name>gpuckpt_[a-z_]+)\{(?P<labels>.*)\} (?P<value>\S+)")


class NotOurs(ValueError):
    """The file holds something that no gpuckpt has written."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run that has ended."""

    command: str
    name: str
    """Of the series or image."""
    ended: float
    """In seconds since 1970."""
    exit_status: int
    success: bool
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase."""
    frozen_seconds: float | None = None
    bytes_raw: int | None = None
    bytes_stored: int | None = None
    bytes_shared: int | None = None


def updated(text: str, run: RunFigures) -> str:
    """The text of the file once this run is in it. Raises NotOurs for a file that is something else."""
    samples = dict(_parse(text))
    own = f'command="{escaped(run.command)}",name="{escaped(run.name)}"'
    fresh = {(name, own): value for name, value in _counted(samples, own, run).items()}
    if run.success:
        samples = {key: value for key, value in samples.items() if not _is_of_success(key, own)}
        fresh |= dict(_of_success(own, run))
    return _written({**samples, **fresh})


def escaped(value: str) -> str:
    """A label value; bytes that are no text are shown as escapes."""
    text = value.encode("utf-8", "backslashreplace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


Samples = dict[tuple[str, str], str]
"""(name, labels) -> value, as they are written."""


def _parse(text: str) -> Iterator[tuple[tuple[str, str], str]]:
    for line in text.split("\n"):
        match = _SAMPLE.fullmatch(line)
        if match is not None and match["name"] in FAMILIES:
            yield (match["name"], match["labels"]), match["value"]
        elif line and not line.startswith("# "):
            raise NotOurs(line[:80])


def _counted(samples: Samples, own: str, run: RunFigures) -> dict[str, str]:
    def one_more(name: str, step: int) -> str:
        return str(_number(samples.get((name, own))) + step)

    values = {
        "gpuckpt_last_run_timestamp_seconds": f"{run.ended:.3f}",
        "gpuckpt_last_run_exit_status": str(run.exit_status),
        "gpuckpt_runs_total": one_more("gpuckpt_runs_total", 1),
        "gpuckpt_runs_failed_total": one_more("gpuckpt_runs_failed_total", int(not run.success)),
    }
    return values | ({"gpuckpt_last_success_timestamp_seconds": f"{run.ended:.3f}"} if run.success else {})


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else 0


def _is_of_success(key: tuple[str, str], own: str) -> bool:
    return key[0] in _OF_SUCCESS and (key[1] == own or key[1].startswith(f"{own},"))


def _of_success(own: str, run: RunFigures) -> Iterator[tuple[tuple[str, str], str]]:
    for phase, seconds in run.seconds.items():
        yield ("gpuckpt_phase_seconds", f'{own},phase="{escaped(phase)}"'), f"{seconds:.6f}"
    if run.frozen_seconds is not None:
        yield ("gpuckpt_frozen_seconds", own), f"{run.frozen_seconds:.6f}"
    sizes = {"raw": run.bytes_raw, "stored": run.bytes_stored, "shared": run.bytes_shared}
    for kind, size in sizes.items():
        if size is not None:
            yield (f"gpuckpt_image_{kind}_bytes", own), str(size)


def _written(samples: Samples) -> str:
    lines: list[str] = []
    for family, (kind, text) in FAMILIES.items():
        of_family = [f"{name}{{{labels}}} {value}" for (name, labels), value in samples.items() if name == family]
        if of_family:
            lines += [f"# HELP {family} {text}", f"# TYPE {family} {kind}", *of_family]
    return "\n".join(lines) + "\n"

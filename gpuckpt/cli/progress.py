"""The progress display on a terminal: one line per phase, gone when the run is over."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from gpuckpt.cli.manner import speaks_unicode
from gpuckpt.cli.speed import Speed
from gpuckpt.cli.words import safe
from gpuckpt.model.report import HOOK_PHASES, Event

LABELS = {
    "lock": "wait for the GPU",
    "gpu_to_host": "GPU memory to host",
    "freeze": "freeze",
    "capture": "capture",
    "publish": "make durable",
    "resume": "resume",
    "verify": "verify",
    "criu": "restore processes",
    "inject": "restore memory",
    "host_to_gpu": "host memory to GPU",
    "ready": "watch it run",
    "transfer": "transfer",
    **{name: name.replace("_", "-") + " command" for name in HOOK_PHASES},
    "judge": "ask the other host",
    "prepare": "restore there, held",
    "go": "hand over",
}


class Progress:
    """Draws events; rich's own thread keeps the clocks running."""

    def __init__(self) -> None:
        unicode = speaks_unicode(sys.stderr)
        self._display = RichProgress(
            SpinnerColumn("dots" if unicode else "line", finished_text="+" if not unicode else "✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr, stderr=True, emoji=False, markup=False, highlight=False),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._speeds: dict[str, Speed] = {}

    def show(self, event: Event) -> None:
        """Draw one event."""
        self._display.start()
        if event.state == "note":
            if event.message:
                self._display.console.print(f"gpuckpt: {safe(event.message)}", markup=False)
            return
        if event.state == "output":
            return
        task = self._task(event.phase)
        if event.state == "end":
            self._finish(task)
        elif event.done_bytes is not None:
            amount = self._speeds.setdefault(event.phase, Speed()).words(event)
            self._display.update(task, completed=event.done_bytes, total=event.total_bytes, amount=amount)

    def _task(self, phase: str) -> TaskID:
        if phase not in self._tasks:
            # A phase that begins ends those before it, also where nobody says so.
            for earlier in self._tasks.values():
                self._finish(earlier)
            label = LABELS.get(phase, safe(phase).replace("_", " "))
            self._tasks[phase] = self._display.add_task(label, total=None, amount="")
        return self._tasks[phase]

    def _finish(self, task: TaskID) -> None:
        self._display.update(task, total=1, completed=1)

    def close(self) -> None:
        """Take the display off the terminal."""
        self._display.stop()

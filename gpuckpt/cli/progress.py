"""The progress display on a terminal: one line per phase, gone when the run is over."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from gpuckpt.cli.manner import speaks_unicode
from gpuckpt.cli.words import safe
from gpuckpt.model.report import Event

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
}


class Progress:
    """Draws events; rich's own thread keeps the clocks running."""

    def __init__(self) -> None:
        unicode = speaks_unicode(sys.stderr)
        self._display = RichProgress(
            SpinnerColumn("dots" if unicode else "line", finished_text="+" if not unicode else "✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr, stderr=True, emoji=False, markup=False, highlight=False),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, event: Event) -> None:
        """Draw one event."""
        if event.phase == "wait":
            return
        self._display.start()
        if event.state == "note":
            if event.message:
                self._display.console.print(f"gpuckpt: {safe(event.message)}", markup=False)
            return
        task = self._tasks.get(event.phase)
        if task is None:
            label = LABELS.get(event.phase, event.phase.replace("_", " "))
            task = self._tasks[event.phase] = self._display.add_task(label, total=event.total_bytes)
        self._display.update(task, completed=event.done_bytes, total=event.total_bytes)
        if event.state == "end":
            self._finish(task)

    def _finish(self, task: TaskID) -> None:
        total = self._display.tasks[self._display.task_ids.index(task)].total or 1
        self._display.update(task, completed=total, total=total)

    def close(self) -> None:
        """Take the display off the terminal."""
        self._display.stop()

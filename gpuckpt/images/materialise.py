"""Pages files as CRIU reads them, out of packs: for the plain restore path and for `inspect --extract`."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from gpuckpt.images.packs import ZERO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from gpuckpt.images.packs import Frame, Index, PackReader


def write_pages(
    reader: PackReader,
    index: Index,
    directory: Path,
    *,
    workers: int = 2,
    names: Iterable[str] | None = None,
    going_on: Callable[[], None] = lambda: None,
) -> None:
    """Write pages files (all, or `names`) into `directory`, every frame verified, with `workers` threads.

    Zero frames become holes. `going_on` is called between frames and may raise. Raises ImageCorrupt,
    OSError; what was written until then stays.
    """
    with ThreadPoolExecutor(workers) as pool:
        for name in index.files if names is None else names:
            _write(reader, index.files[name], directory / name, pool, going_on)


def _write(
    reader: PackReader,
    frames: tuple[Frame, ...],
    path: Path,
    pool: ThreadPoolExecutor,
    going_on: Callable[[], None],
) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def place(frame: Frame) -> None:
        raw, done = reader.read(frame), 0
        while done < frame.raw and frame.pack != ZERO:
            done += os.pwrite(descriptor, raw[done:], frame.offset + done)

    pending: list[Future[None]] = []
    try:
        os.ftruncate(descriptor, frames[-1].offset + frames[-1].raw if frames else 0)
        pending = [pool.submit(place, frame) for frame in frames]
        for future in pending:
            future.result()
            going_on()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)  # no thread may write any more when another file gets this number
        os.close(descriptor)

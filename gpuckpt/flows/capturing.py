"""The two ways a tree's images reach the disk: streamed into packs (the normal one), or written by CRIU (plain)."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpuckpt.flows import unsealing
from gpuckpt.images import cuts, packs, sharing
from gpuckpt.images.capture import Capture, Settings
from gpuckpt.images.packindex import MAX_INDEX_BYTES
from gpuckpt.model.errors import DumpFailed, GpuckptError, ImageCorrupt, ImageTooNew, NotFound, Refused
from gpuckpt.model.manifest import Part
from gpuckpt.model.records import dataclass
from gpuckpt.model.redacted import is_encrypted
from gpuckpt.owner import hostchanges
from gpuckpt.stores import directory
from gpuckpt.system import procfs
from gpuckpt.system.hostsettings import PIPE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuckpt.flows.farpacks import FarPacks
    from gpuckpt.flows.interruption import Interruption
    from gpuckpt.flows.sealing import Sealing
    from gpuckpt.images.cuts import Cuts
    from gpuckpt.images.packindex import Index
    from gpuckpt.images.sharing import Base
    from gpuckpt.model.facts import CriuProgram
    from gpuckpt.model.requests import DumpRequest
    from gpuckpt.owner.runs import Run
    from gpuckpt.stores.directory import Image
    from gpuckpt.stores.partialimage import PartialImage

STREAM_SINCE = (3, 15)
"""The CRIU that first had --stream."""

MOST_WORKERS = 16
"""16 cores, 13.6 GB: 12 workers took 1.57 s, 16 took 1.50, 20 took 1.59. More did not help on 32 cores either: by then
CRIU's one thread that hands the pages over is what takes the time."""

COMPLETE_SECONDS = 600.0
"""How long the last frames may take to be written once CRIU has sent all: a full queue on a very slow disk."""

PROGRESS_SECONDS = 2.0
STEP_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Content:
    """What a complete capture has put into the image."""

    parts: tuple[Part, ...]
    stored: tuple[Part, ...]
    """The same as they lie in the image: where that is encrypted, others."""
    requires: tuple[str, ...]
    """Features that a reader must know."""
    bytes_raw: int
    """Without captured files: what the tree will need of memory."""
    bytes_shared: int = 0
    """Of the parts, those that are hard links to a base's."""
    notes: tuple[str, ...] = ()


class Capturing(Protocol):
    """One way. `close` in any case; `abort` at once when the dump fails, so that CRIU does not go on."""

    images: Path
    """CRIU's images directory."""
    streamed: bool

    def start(self) -> None:
        """CRIU may come."""

    def made_progress(self) -> bool:
        """Whether to tell the owner that work goes on although CRIU's log does not grow."""

    def complete(self, going_on: Callable[[], None]) -> None:
        """CRIU stands at the gate: all it sent has been taken when this returns. Raises GpuckptError, OSError."""

    def content(self, partial: PartialImage, going_on: Callable[[], None]) -> Content:
        """Finish all files. Raises GpuckptError, OSError."""

    def trouble(self) -> Exception | None:
        """Why CRIU failed, where we know better than its log."""

    def abort(self) -> None:
        """Stop taking anything."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(slots=True)
class Plain:
    """CRIU writes all files itself; they are read once more for their digests."""

    images: Path
    streamed: bool = False

    def start(self) -> None:
        """Nothing to do."""

    def made_progress(self) -> bool:
        """CRIU's log and its counters tell."""
        return False

    def complete(self, going_on: Callable[[], None]) -> None:
        """CRIU has written all before it came to the gate."""

    def content(self, partial: PartialImage, going_on: Callable[[], None]) -> Content:
        """Digest every file."""
        parts = directory.describe_parts(partial.path, going_on)
        memory = [part for part in parts if not part.path.startswith(f"{partial.files.name}/")]
        return Content(parts, parts, ("criu-files",), directory.sizes(memory))

    def trouble(self) -> None:
        """CRIU's log knows all."""

    def abort(self) -> None:
        """The owner stops CRIU."""

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(slots=True)
class Streamed:
    """CRIU hands all over; this process makes packs of the pages."""

    images: Path
    capture: Capture
    packs: Path
    base: Base | None
    run_directory: Path
    notes: list[str]
    """What is found out on the way goes there."""
    far: FarPacks | None = None
    """The packs grow on another host."""
    sealing: Sealing | None = None
    streamed: bool = True
    _seen_bytes: int = 0
    _seen_at: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Serve CRIU."""
        self.capture.start()

    def made_progress(self) -> bool:
        """Whether pages have come since the last time, every few seconds."""
        now = time.monotonic()
        if now - self._seen_at < PROGRESS_SECONDS or self.capture.raw_bytes == self._seen_bytes:
            return False
        self._seen_bytes, self._seen_at = self.capture.raw_bytes, now
        return True

    def complete(self, going_on: Callable[[], None]) -> None:
        """Wait for the frames that are on their way.

        Pages in pipes are still the tree's own memory: it may not run before they have been read.
        """
        until = time.monotonic() + COMPLETE_SECONDS
        while not self._is_complete():
            going_on()
            if time.monotonic() > until:
                raise DumpFailed("CRIU says that all was sent, but the stream has no end", "dump with --plain")
        self._put_pipe_limit_back()

    def _put_pipe_limit_back(self) -> None:
        self.notes += hostchanges.put_back(self.run_directory, (PIPE_SIZE,))

    def _is_complete(self) -> bool:
        with _telling():
            return self.capture.wait_complete(STEP_SECONDS)

    def content(self, partial: PartialImage, going_on: Callable[[], None]) -> Content:
        """Finish the packs, take over what the base has, write the index."""
        with _telling():
            captured = self.capture.finish()
        going_on()
        digest_key = self.sealing.digest_key if self.sealing is not None else b""
        joined = sharing.join(captured, self.base, self.packs, digest_key, elsewhere=self.far is not None)
        raw = packs.encode(joined.index)
        if len(raw) > MAX_INDEX_BYTES:
            raise DumpFailed("the memory is in more pieces than an index can hold", "dump with --plain")
        folder = self.packs.name
        index = partial.hidden / folder / packs.NAME
        index.parent.mkdir(mode=0o700, exist_ok=True)
        _write(index, raw)
        parts = [Part(f"{partial.criu.name}/{one.name}", one.size, one.blake3) for one in captured.small]
        parts += [Part(f"{folder}/{one.file}", one.size, one.name) for one in joined.index.packs]
        parts.append(Part(f"{folder}/{packs.NAME}", len(raw), directory.digest(index)))
        small = sum(one.size for one in captured.small)
        files = directory.describe_parts(partial.hidden, going_on, below=partial.files)
        every = tuple(sorted((*parts, *files), key=lambda part: part.path))
        return Content(
            parts=every,
            stored=every if self.sealing is None else self.sealing.seal(partial, every, going_on),
            requires=("packs",),
            bytes_raw=joined.index.raw_bytes() + small,
            bytes_shared=joined.shared,
            notes=tuple(joined.notes),
        )

    def trouble(self) -> Exception | None:
        """What failed in a thread: CRIU only saw its pipe break."""
        error = self.capture.error
        if error is None or isinstance(error, (OSError, GpuckptError)):
            return error
        return _worker_failed(error)

    def abort(self) -> None:
        """Close the pipes: CRIU's next write fails."""
        self.capture.fail()
        if self.far is not None:
            self.far.cut()

    def close(self) -> None:
        """End the threads."""
        if self.far is not None:
            self.far.cut()
        self.capture.close()
        self._put_pipe_limit_back()


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """What failed in a thread of the capture is told, whatever it is: the tree must go on."""
    try:
        yield
    except (OSError, GpuckptError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        raise _worker_failed(error) from None


def _worker_failed(error: BaseException) -> DumpFailed:
    return DumpFailed(f"the capture failed: {error!r}", "this is a bug; `gpuckpt dump --plain` does without it")


def _write(path: Path, raw: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(raw)


def prepare(
    request: DumpRequest,
    program: CriuProgram,
    run: Run,
    partial: PartialImage,
    base: Image | None,
    notes: list[str],
    far: FarPacks | None = None,
    sealing: Sealing | None = None,
) -> Capturing:
    """The way this dump goes; when it cannot be the streamed one, `notes` gets the reason.

    With `far` the packs of a streamed one grow on another host. Raises OSError; Refused where an image that shall be
    encrypted cannot be streamed.
    """
    why = "--plain" if request.plain else why_not_streamed(program)
    if not why:
        try:
            return _streamed(request, run, partial, base, notes, far, sealing)
        except OSError as error:
            if error.filename is not None and Path(str(error.filename)).is_relative_to(partial.path):
                raise  # the image's own file system: the plain path would fail there too
            why = error.strerror or str(error)
    if sealing is not None:
        raise Refused(
            f"the image cannot be encrypted: CRIU would write it to the disk itself ({why})",
            "dump without --encrypt-to, or install a newer CRIU",
        )
    if not request.plain:
        notes.append(f"CRIU wrote the image itself, without compression: streaming is not possible ({why})")
    if base is not None:
        notes.append("the base was not used: CRIU wrote the image itself")
    return Plain(partial.criu)


def why_not_streamed(program: CriuProgram) -> str:
    """Why this CRIU cannot hand its images over; '' when it can."""
    numbers = tuple(int(part) for part in (program.version or "0").split("."))
    return "" if numbers >= STREAM_SINCE else f"CRIU {program.version} has no --stream"


def _streamed(
    request: DumpRequest,
    run: Run,
    partial: PartialImage,
    base: Image | None,
    notes: list[str],
    far: FarPacks | None,
    sealing: Sealing | None,
) -> Streamed:
    workers = far.count if far is not None else request.workers or default_workers()
    shared = _read_base(base, workers, notes, request.identity, sealing) if base is not None else None
    if sealing is not None and shared is not None:
        sealing.digest_key = shared.index.digest_key
    digest_key = sealing.digest_key if sealing is not None else b""
    settings = Settings(workers, request.level, digest_later=request.leave_running, digest_key=digest_key)
    images, target = run.directory / "stream", partial.path / "packs"
    images.mkdir(mode=0o700)
    target.mkdir(mode=0o700)
    notes += hostchanges.raise_pipe_limit(run.directory)
    try:
        capture = Capture(
            images,
            partial.criu,
            target,
            settings,
            open_pack=far.open if far is not None else None,
            cuts_for=lambda pid: _cuts(pid, shared),
            known=shared.known() if shared is not None else None,
        )
    except BaseException:
        hostchanges.put_back(run.directory, (PIPE_SIZE,))
        shutil.rmtree(target, ignore_errors=True)
        raise
    return Streamed(images, capture, target, shared, run.directory, notes, far, sealing)


def default_workers() -> int:
    """One for each core that we may use."""
    return min(max(len(os.sched_getaffinity(0)), 2), MOST_WORKERS)


def _cuts(pid: int, base: Base | None) -> Cuts | None:
    """Where frames of a process end; called while it stands still."""
    layout = procfs.page_layout(pid)
    if layout is None:
        return None
    return cuts.cut(pid, layout.mappings, layout.runs, base.index.windows if base is not None else ())


def _read_base(
    base: Image, first: int, notes: list[str], identity: Path | None, sealing: Sealing | None
) -> Base | None:
    why_not = unsealing.why_not_shared(base.manifest, identity, encrypted=sealing is not None)
    if why_not:
        notes.append(f"{base_shares_nothing(base.path)}: {why_not}")
        return None
    try:
        index = _index_of(base, identity)
        _require_names_that_fit(base, index)
        return sharing.Base(base.part("packs"), index, first)
    except (Refused, NotFound) as error:  # the key is not the one, and nothing is said against the base
        notes.append(f"{base_shares_nothing(base.path)}: {error.message}")
        return None
    except (ImageCorrupt, ImageTooNew) as error:
        notes.append(f"{base_not_used(base.path)}: {error.message}")
        return None


def _require_names_that_fit(base: Image, index: Index) -> None:
    """A pack that is taken over counts by its name: it must be what the base was verified by. Raises ImageCorrupt."""
    verified = {part.path: part.blake3 for part in base.manifest.parts}
    for pack in index.packs:
        if verified.get(f"packs/{pack.file}") != pack.name:
            raise ImageCorrupt(f"packs/{pack.file} is not what its name says", "dump without --base")


def _index_of(base: Image, identity: Path | None) -> Index:
    if identity is None or not is_encrypted(base.manifest):
        return packs.read_index(base.part(f"packs/{packs.NAME}"))
    return unsealing.read_index(base, unsealing.image_key(base, identity))


def base_not_used(base: Path) -> str:
    """How a note begins that says why a base was not used: it is not what it should be."""
    return f"the base {base} was not used"


def base_shares_nothing(base: Path) -> str:
    """How a note begins that says why a base is of no use here, good as it may be."""
    return f"the base {base} shares nothing"


def open_base(request: DumpRequest, interruption: Interruption, notes: list[str]) -> Image | None:
    """The base image, every byte of it verified: a frame taken over is not read again.

    A damaged one is not used, and `notes` says so; in a series, for which nobody has named it, nor is one that cannot
    be opened. Raises NotFound, Refused, BrokenOff.
    """
    if request.base is None or request.plain:
        return None
    unusable = ImageCorrupt if request.into is None else GpuckptError
    try:
        image = directory.open_image(request.base)
    except unusable as error:
        notes.append(f"{base_not_used(request.base)}: {error.message}")
        return None
    try:
        if not request.dry_run:
            # In a series the last dump wrote it: from memory it would look whole whatever the disk has made of it.
            directory.verify(image, interruption.check, from_disk=request.into is not None)
    except ImageCorrupt as error:
        image.close()
        notes.append(f"{base_not_used(request.base)}: {error.message}")
        return None
    except BaseException:
        image.close()
        raise
    return image

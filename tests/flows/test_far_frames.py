"""Frames over lines that break, lie or fall silent: each comes once and is what it was, or nothing is made of it."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest

from gpuckpt.flows import farimage, reconnecting
from gpuckpt.flows.farimage import FarFrames, FarImage
from gpuckpt.images import framesource
from gpuckpt.images.packindex import read_index
from gpuckpt.images.packs import PackReader
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import GpuckptError, ImageCorrupt, TransferFailed
from gpuckpt.model.location import parse
from gpuckpt.model.requests import Reach
from gpuckpt.stores.serving import Server
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import LinkLost
from tests.lines import Line, bytes_of
from tests.small_images import make_image

THREADS = 3


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return make_image(tmp_path_factory.mktemp("images") / "one", 61, packs=3, entropy=0.5)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """No long pauses before connections are opened again."""
    monkeypatch.setattr(reconnecting, "PAUSES", (0.01,) * 5)


class Caller:
    """Connects over one line after the other; the last one is used for ever."""

    def __init__(self, *lines: Line) -> None:
        self._lines = list(lines)
        self.used: list[Line] = []

    def __call__(self, _reach, _pace):
        self.used.append(self._lines.pop(0) if len(self._lines) > 1 else self._lines[0])
        return SshStore(self.used[-1])


@contextlib.contextmanager
def frames_of(image, connect):
    """The frames of an image over these lines, and what was said of them."""
    said: list[str] = []
    far = FarImage(Reach(parse(f"far:{image}")), said.append, connect)
    index = read_index(image / "packs" / "index")
    frames = FarFrames(far, far.insist().offer.manifest, index, lambda _size: THREADS, lambda: None)
    frames.said, frames.far, frames.index = said, far, index
    try:
        yield frames
    finally:
        frames.close()
        for line in getattr(connect, "used", ()):
            line.ended()


def collected(frames, going_on=lambda: None, at_first=lambda: None):
    """Every frame by its number, as it came; twice is an error."""
    wanted = [frame for found in frames.index.files.values() for frame in found]
    came: dict[int, bytes] = {}

    def acting(buffer):
        at_first_once = [at_first]

        def act(frame, number):
            if at_first_once:
                at_first_once.pop()()
            assert number not in came
            came[number] = bytes(buffer[: frame.raw])

        return act

    works = ((frame, number) for number, frame in enumerate(wanted))
    framesource.carry_out(frames, works, frames.index.raw_bytes(), acting, going_on)
    return [came[number] for number in range(len(wanted))]


def truth(image):
    index = read_index(image / "packs" / "index")
    with PackReader(image / "packs", index) as reader:
        return [bytes(reader.read(frame)) for found in index.files.values() for frame in found]


def test_all_connections_carry_frames(image):
    all_at_work = threading.Barrier(THREADS)
    with frames_of(image, Caller(Line())) as frames:
        assert collected(frames, at_first=lambda: all_at_work.wait(60)) == truth(image)
        assert frames.far.connections == THREADS


@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_a_line_that_breaks_goes_on_with_what_is_missing(image, share):
    total = sum(path.stat().st_size for path in (image / "packs").iterdir())
    cut = Line(bytes_until_cut=int(share * total))
    with frames_of(image, Caller(cut, Line())) as frames:
        assert collected(frames) == truth(image)
        assert any("connecting again" in words for words in frames.said)
        # What was under way on each connection is asked for again, no more.
        assert frames.far.received_bytes <= total


def test_lines_that_break_again_and_again_end_in_words(image):
    answers = iter([Line()])

    def connect(_reach, _pace):
        line = next(answers, None)
        if line is None:
            raise LinkLost("far cannot be reached")
        connect.used.append(line)
        return SshStore(line)

    connect.used = []
    with frames_of(image, connect) as frames:
        connect.used[0].purse[0] = 5_000_000
        with pytest.raises(TransferFailed, match="cannot be reached") as failure:
            collected(frames)
        assert "begins again" in failure.value.hint


def test_further_connections_that_cannot_be_had(image):
    line = Line()
    first = [True]
    run = line.run

    def run_once(command, **how):
        if not first:
            raise LinkLost("too many connections")
        first.pop()
        return run(command, **how)

    line.run = run_once
    with frames_of(image, Caller(line)) as frames:
        assert collected(frames) == truth(image)
        assert frames.far.connections == 1
        assert frames.said == []


def lying(question, change, after=0):
    """A line whose answers to one question are changed from the `after`th on."""
    seen = []

    class Liar(Server):
        def _answer(self, frame):
            header, payload = super()._answer(frame)
            if frame.header.get("do") != question:
                return header, payload
            seen.append(1)
            return change(header, bytes_of(payload)) if len(seen) > after else (header, payload)

    return Line(serve=lambda link: Liar(link).run())


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (lambda h, p: (h, p[:-9] + bytes([p[-9] ^ 1]) + p[-8:]), ImageCorrupt),
        (lambda h, p: (h, bytes(len(p))), ImageCorrupt),
        (lambda h, p: (h, p[:-1]), TransferFailed),
        (lambda h, p: (h, p + b"x"), TransferFailed),
        (lambda _h, p: ({"error": {"code": "internal", "message": "no"}}, b""), TransferFailed),
    ],
)
def test_a_frame_that_is_another_one_ends_it(image, change, failure):
    with frames_of(image, Caller(lying("read", change, after=3))) as frames, pytest.raises(failure):
        collected(frames)


def test_an_image_that_is_exchanged_meanwhile(image):
    def other(header, payload):
        manifest = manifests.decode(payload, "x")
        return header, manifests.encode(manifests.with_notes(manifest, "another one"))

    with (
        frames_of(image, Caller(Line(bytes_until_cut=9_000_000), lying("open", other))) as frames,
        pytest.raises(TransferFailed, match="exchanged"),
    ):
        collected(frames)


class Enough(Exception):
    """What a signal is to a restore."""


@pytest.mark.parametrize("reconnecting_too", [False, True])
def test_a_silent_far_side_does_not_hold_up_a_signal(image, reconnecting_too):
    """Both where an answer is waited for, and where a connection is being opened."""
    over, silent = threading.Event(), threading.Event()

    def fall_silent(header, payload):
        silent.set()
        if reconnecting_too:
            raise LinkLost("gone")
        over.wait(60)
        return header, payload

    lines = iter([lying("read", fall_silent, after=3)])

    def connect(_reach, _pace):
        line = next(lines, None)
        if line is None:
            over.wait(60)
            raise LinkLost("too late")
        return SshStore(line)

    def going_on():
        if silent.is_set():
            raise Enough

    with frames_of(image, connect) as frames:
        with pytest.raises(Enough):
            collected(frames, going_on)
        assert not over.is_set()
        over.set()


def test_an_index_that_names_what_the_manifest_does_not(image):
    index = read_index(image / "packs" / "index")
    manifest = manifests.decode((image / manifests.NAME).read_bytes(), "x")
    parts = tuple(part for part in manifest.parts if index.packs[1].file not in part.path)
    less = SimpleNamespace(parts=parts)
    far = FarImage(Reach(parse("far:/x")), print)
    with pytest.raises(ImageCorrupt, match="not in the manifest"):
        FarFrames(far, less, index, lambda _size: 1, lambda: None)
    far.end()


def test_the_newest_of_a_series_stays_the_one_that_was_opened(tmp_path):
    """While the tree is filled another dump may come: the next connection must not find that one's memory."""
    tmp_path.chmod(0o700)
    old, new = (make_image(tmp_path / name, 0.1, seed=seed, packs=1) for seed, name in enumerate(("old", "new")))
    latest, caller = tmp_path / "latest", Caller(Line())
    latest.symlink_to(old.name)
    far = FarImage(Reach(parse(f"far:{latest}")), lambda _words: None, caller)
    raw = far.insist().offer.raw_manifest
    latest.unlink()
    latest.symlink_to(new.name)
    far.lost(far.current(), LinkLost("cut"))
    again = far.insist().offer
    assert (again.raw_manifest, again.path) == (raw, str(old))
    far.end()
    for line in caller.used:
        line.ended()


def test_the_other_side_hears_of_us_while_nothing_is_read(image, monkeypatch):
    """A hook of minutes, say: it would go after one without a word."""
    monkeypatch.setattr(farimage, "ALIVE_SECONDS", 0.02)
    heard = threading.Event()

    def hear(header, payload):
        heard.set()
        return header, payload

    # The first two measure the round trip.
    with frames_of(image, Caller(lying("ping", hear, after=2))) as frames:
        assert heard.wait(60)
        assert collected(frames) == truth(image)


def test_single_frames_are_fetched_once(image):
    with frames_of(image, Caller(Line())) as frames:
        frame = next(iter(frames.index.files.values()))[0]
        once = bytes(frames.read(frame))
        before = frames.far.received_bytes
        assert bytes(frames.read(frame)) == once == truth(image)[0]
        assert frames.far.received_bytes == before


def test_an_error_of_the_file_system_there_is_no_error_of_memory_here(image):
    with frames_of(image, Caller(Line())) as frames:

        def refuse(_pieces):
            raise PermissionError(13, "Permission denied", "packs/x")
            yield

        open_reader = frames.far.current().offer.open_reader

        def opened():
            reader = open_reader()
            reader.stream = refuse
            return reader

        frames.far.current().offer.open_reader = opened
        with pytest.raises(GpuckptError, match="Permission denied"):
            collected(frames)

"""A push whose line is cut at any byte, repeated, equals one clean push. The protocol without ssh: thousands of places."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuckpt.flows.lanes import Lanes, missing_pieces
from gpuckpt.model.errors import GpuckptError
from gpuckpt.stores.journal import held_bytes
from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.links import LinkLost
from tests.harness import wait_for
from tests.lines import Line
from tests.small_images import content_of, make_image


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    make_image(root / "one", 17, packs=2)
    return root


def quiet(_done, _total):
    """A ticker."""


def push(line: Line, source, target) -> tuple[int, int]:
    """One attempt: (bytes sent, bytes that were there)."""
    store = None
    try:
        store = SshStore(line)
        arrival = store.receive(str(target), source.raw_manifest)
        parts = source.manifest.parts
        held = held_bytes(parts, arrival.held())
        with Lanes(missing_pieces(parts, arrival.held()), source.open_reader, arrival.open_writer) as lanes:
            if not arrival.already:
                lanes.start(2)
                while not lanes.wait(1):
                    pass
        assert list(arrival.verify(quiet)) == []
        arrival.publish()
        return lanes.arrived_bytes, held
    finally:
        if store is not None:
            store.close()
        line.ended()


def clean_bytes(images, root) -> int:
    line = Line()
    source = DirectoryStore().offer(str(images / "one"))
    push(line, source, root / "one")
    source.close()
    return (1 << 60) - line.purse[0]


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory) -> int:
    """The bytes of a clean push, all connections and both directions."""
    root = tmp_path_factory.mktemp("clean")
    root.chmod(0o700)
    return clean_bytes(images, root)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cut_at_any_byte_and_repeated_equals_one_clean_push(images, whole, tmp_path_factory, data):
    root = tmp_path_factory.mktemp("there")
    root.chmod(0o700)
    source = DirectoryStore().offer(str(images / "one"))
    sizes = st.one_of(st.integers(0, 3000), st.integers(0, whole), st.integers(whole - 3000, whole))
    with contextlib.suppress(LinkLost, GpuckptError):
        push(Line(data.draw(sizes, label="cut after")), source, root / "one")
    sent, held = push(Line(), source, root / "one")
    source.close()
    total = sum(part.size for part in source.manifest.parts)
    assert sent + held == total or (sent, held) == (0, 0), "not just what was missing was sent"
    assert content_of(root / "one") == content_of(images / "one")
    assert [path.name for path in root.iterdir()] == ["one"]


def test_a_late_cut_costs_only_what_was_under_way(images, whole, tmp_path):
    tmp_path.chmod(0o700)
    source = DirectoryStore().offer(str(images / "one"))
    with pytest.raises((LinkLost, GpuckptError)):
        push(Line(whole - (1 << 20)), source, tmp_path / "one")
    sent, held = push(Line(), source, tmp_path / "one")
    source.close()
    assert held > sent > 0
    assert wait_for(lambda: not list(tmp_path.glob("*.partial")), "the partial goes")

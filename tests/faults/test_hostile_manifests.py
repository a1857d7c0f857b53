"""manifest.json is hostile input: whatever stands in it, it is read as a manifest or refused in words."""

from __future__ import annotations

import copy
import json
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt, ImageTooNew, NotFound
from gpuckpt.stores import directory

SAMPLE = Path(__file__).parent.parent / "data" / "manifest-format-1.json"
RAW = SAMPLE.read_bytes()
BODY = json.loads(RAW)
MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def _sealed(body: dict) -> bytes:
    """With the digest that fits: whoever forges an image can compute it."""
    body = {key: value for key, value in body.items() if key != "blake3"}
    try:
        digest = manifests._digest(body)
    except RecursionError:
        digest = "0" * 64
    return json.dumps({**body, "blake3": digest}).encode()


def _with(**changes: object) -> bytes:
    return _sealed({**copy.deepcopy(BODY), **changes})


def _corrupt(raw: bytes, *words: str) -> ImageCorrupt:
    with pytest.raises(ImageCorrupt) as caught:
        manifests.decode(raw, "manifest.json")
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert len(caught.value.message) < 1000
    return caught.value


def _read_or_refused(raw: bytes) -> manifests.Manifest | None:
    """The promise: nothing but a manifest that can be worked with, ImageCorrupt or ImageTooNew."""
    try:
        manifest = manifests.decode(raw, "manifest.json")
    except (ImageCorrupt, ImageTooNew) as error:
        assert error.message
        assert len(error.message) < 2000
        return None
    assert all(manifests.stays_inside(part.path) for part in manifest.parts)
    assert {captured.part for captured in manifest.captured} <= {part.path for part in manifest.parts}
    for captured in manifest.captured:
        assert captured.path.startswith("/")
        assert ".." not in captured.path.split("/")
    for file in manifest.tree.files:
        file.path.encode("utf-8", "surrogateescape")
    assert manifest.tree.root.pid in manifest.tree.pids
    assert manifests.decode(manifests.encode(manifest), "again") == manifest
    return manifest


def test_format_1_is_read_for_ever():
    """An image of format 1, as the first release wrote it. This file never changes; readers do."""
    manifest = manifests.decode(RAW, str(SAMPLE))
    assert manifest.format == 1
    assert manifest.requires == ("criu-files",)
    assert [process.comm for process in manifest.tree.processes] == ["python", "python"]
    assert manifest.tree.root == manifest.tree.processes[0].id
    assert manifest.criu.version == "4.2.1"
    assert manifest.captured[0].reason == "link-remap"
    assert manifest.cuda[0].gpu_memory_bytes == {"GPU-00000000-0000-0000-0000-000000000001": 16 << 30}
    assert manifest.lineage.generation == 2
    assert sum(part.size for part in manifest.parts) == manifest.bytes_raw
    assert manifests.decode(manifests.encode(manifest), "again") == manifest


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**18, max_value=10**40)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["../x", "/etc/passwd", "criu/../../x", "a\0b", "\ud800", "\udcff", "", ".", "manifest.json"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def _places(value: object, at: tuple = ()) -> list[tuple]:
    found = [at] if at else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += _places(inner, (*at, index))
    return found


PLACES = [place for place in _places(BODY) if place != ("blake3",)]


def _at(body: object, place: tuple) -> object:
    for key in place:
        body = body[key]
    return body


@MANY
@given(
    st.lists(
        st.tuples(st.sampled_from(PLACES), st.sampled_from(["replace", "delete", "double", "swap"]), JSON),
        min_size=1,
        max_size=3,
    )
)
def test_values_are_changed(changes):
    """Values of any kind at any place, with a digest that fits."""
    body = copy.deepcopy(BODY)
    for place, how, value in changes:
        try:
            parent, key = _at(body, place[:-1]), place[-1]
            if how == "replace":
                parent[key] = value
            elif how == "delete":
                del parent[key]
            elif how == "double" and isinstance(parent, list):
                parent.append(parent[key])
            elif how == "swap":
                parent[key] = copy.deepcopy(_at(BODY, PLACES[len(repr(value)) * 37 % len(PLACES)]))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
    _read_or_refused(_sealed(body))


@MANY
@given(st.integers(0, len(RAW) - 1), st.binary(max_size=8), st.integers(0, 8))
def test_bytes_are_changed(offset, put, taken):
    """Without a digest that fits: only a change that changes nothing is read."""
    raw = RAW[:offset] + put + RAW[offset + taken :]
    manifest = _read_or_refused(raw)
    assert manifest is None or manifest == manifests.decode(RAW, "whole")


@MANY
@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_at_all(raw):
    assert _read_or_refused(raw) is None


def test_a_cut_manifest():
    for size in range(0, len(RAW) - 2, 97):
        _corrupt(RAW[:size])


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "criu/../../x",
        "criu//x",
        "./criu/x",
        "criu/.",
        "",
        "..",
        "a/../b",
        "criu/",
        "manifest.json",
    ],
)
def test_a_part_outside(path):
    _corrupt(_with(parts=[*BODY["parts"], {"path": path, "size": 1, "blake3": "0" * 64}]), "part path")


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_a_path_that_no_file_can_have(path):
    _corrupt(_with(parts=[*BODY["parts"], {"path": path, "size": 1, "blake3": "0" * 64}]), "no possible text")


def test_a_part_named_twice():
    _corrupt(_with(parts=[*BODY["parts"], BODY["parts"][0]]), BODY["parts"][0]["path"])


@pytest.mark.parametrize(
    "change",
    [
        {"part": "../../etc/shadow"},
        {"part": "/etc/shadow"},
        {"part": "files/not-a-part"},
        {"path": "etc/cron.d/x"},
        {"path": "/srv/../etc/cron.d/x"},
        {"path": "/"},
        {"linked_to": "relative"},
        {"linked_to": "/srv/../../etc/x"},
        # Nothing but a name of CRIU's, beside a file that the tree had.
        {"path": "/etc/cron.d/link_remap.1"},
        {"path": "/srv/job/passwd"},
        {"linked_to": "/etc/passwd"},
        {"reason": "open"},
        {"reason": "whatever"},
        {"uid": -1},
        {"gid": 2**32 - 1},
        {"mode": 0o10000},
    ],
)
def test_a_captured_file_outside(change):
    _corrupt(_with(captured=[{**BODY["captured"][0], **change}]), "captured file")


LOG = next(file for file in BODY["tree"]["files"] if file["path"] == "/srv/job/log")
OPEN = {
    "path": LOG["path"],
    "part": "files/open-0",
    "reason": "open",
    "linked_to": "",
    "mode": LOG["mode"] & 0o7777,
    "uid": LOG["uid"],
    "gid": LOG["gid"],
    "mtime_ns": 10**18,
}


def _with_open(captured: list[dict], size: int = LOG["size"], **of_the_file: object) -> bytes:
    """A manifest with an open file in it, of which the tree's facts are changed as well."""
    tree = copy.deepcopy(BODY["tree"])
    for file in tree["files"]:
        if file["path"] == LOG["path"]:
            file.update(of_the_file)
    parts = [*BODY["parts"], {"path": "files/open-0", "size": size, "blake3": "0" * 64}]
    return _with(captured=captured, parts=parts, tree=tree, requires=["criu-files", "open-files"])


def test_an_open_file_is_read():
    (one,) = manifests.decode(_with_open([OPEN]), "manifest.json").captured
    assert (one.path, one.reason) == (LOG["path"], "open")


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/etc/passwd"},
        {"path": "/srv/job"},
        {"path": "/srv/job/./log"},
        {"path": "/srv/job/linked"},  # deleted: CRIU has it
        {"mode": 0o777},
        {"uid": 1000},
        {"gid": 1000},
        {"linked_to": "/srv/job/other"},
        {"part": "files/open-1"},
        {"part": "files/0"},  # of another size
        {"reason": "link-remap"},
    ],
)
def test_an_open_file_that_the_tree_had_not(change):
    _corrupt(_with_open([{**OPEN, **change}]), "captured file")


def _two_names(change: dict, **of_the_other: object) -> bytes:
    """A manifest whose tree has an open file under two names."""
    content = json.loads(_with_open([OPEN, {**OPEN, "path": "/srv/job/too", "linked_to": LOG["path"], **change}]))
    content["tree"]["files"].append({**LOG, "path": "/srv/job/too", **of_the_other})
    return _with(**{key: content[key] for key in ("captured", "parts", "tree", "requires")})


def test_a_further_name_is_read():
    first, other = manifests.decode(_two_names({}), "manifest.json").captured
    assert (other.part, other.linked_to) == (first.part, first.path)


@pytest.mark.parametrize(
    ("change", "of_the_other"),
    [
        ({"linked_to": "/etc/passwd"}, {}),
        ({"linked_to": "/srv/job/too"}, {}),
        ({"part": "files/0"}, {}),
        ({}, {"inode": LOG["inode"] + 1}),
        ({}, {"device": LOG["device"] + 1}),
    ],
)
def test_a_further_name_of_another_file(change, of_the_other):
    _corrupt(_two_names(change, **of_the_other), "captured file")


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFLNK, stat.S_IFSOCK, stat.S_IFDIR])
def test_an_open_file_that_is_none(kind):
    _corrupt(_with_open([OPEN], mode=kind | LOG["mode"] & 0o7777), "captured file")


@pytest.mark.parametrize("bit", [stat.S_ISUID, stat.S_ISGID, stat.S_ISUID | stat.S_ISGID])
def test_an_open_file_with_rights_of_its_own(bit):
    _corrupt(_with_open([{**OPEN, "mode": OPEN["mode"] | bit}], mode=LOG["mode"] | bit), "captured file")


def test_an_open_file_twice():
    _corrupt(_with_open([OPEN, OPEN]), "captured file")


@pytest.mark.parametrize("version", [2, 7, 10**30])
def test_a_newer_format(version):
    with pytest.raises(ImageTooNew) as caught:
        manifests.decode(_with(format=version, gpuckpt="9.1"), "manifest.json")
    assert str(version)[:20] in caught.value.message
    assert "9.1" in caught.value.hint


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.0, True, [1]])
def test_no_format_that_ever_was(version):
    _corrupt(_with(format=version))


def test_an_unknown_feature():
    with pytest.raises(ImageTooNew, match="time-travel") as caught:
        manifests.decode(_with(requires=["criu-files", "time-travel"]), "manifest.json")
    assert BODY["gpuckpt"] in caught.value.hint


def test_features_of_a_wrong_kind():
    for requires in ([["criu-files"]], [{}], [None], {"criu-files": 1}, "criu-files"):
        _corrupt(_with(requires=requires))


@pytest.mark.parametrize("depth", [100, 900, 1500, 5000, 100_000])
def test_deep_nesting(depth):
    nested = b"[" * depth + b"]" * depth
    _read_or_refused(RAW.replace(b'"notes": [', b'"more": ' + nested + b',\n "notes": [', 1))
    _corrupt(nested)
    body = b'{"format": 1, "requires": ' + nested + b"}"
    _corrupt(body)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "-0.0", "1e-400"])
def test_numbers_that_are_none(number):
    raw = RAW.replace(
        b'"frozen_seconds": ' + str(BODY["frozen_seconds"]).encode(), f'"frozen_seconds": {number}'.encode()
    )
    assert raw != RAW
    assert _read_or_refused(raw) is None


def test_impossible_processes():
    root = BODY["tree"]["root"]
    for pid in (0, -1, 1 << 23, 10**30):
        tree = copy.deepcopy(BODY["tree"])
        tree["root"] = tree["processes"][0]["id"] = {**root, "pid": pid}
        _corrupt(_with(tree=tree, cuda=[], stopped=[]))
    _corrupt(_with(tree={**BODY["tree"], "processes": []}))
    _corrupt(_with(tree={**BODY["tree"], "root": {"pid": 1, "start_ticks": 1}}))
    _corrupt(_with(stopped=[{"pid": 1, "start_ticks": 1}]))
    _corrupt(_with(tree={**BODY["tree"], "processes": [*BODY["tree"]["processes"], BODY["tree"]["processes"][0]]}))


@pytest.mark.parametrize(
    "ranges",
    [[[4096, 4096]], [[8192, 4096]], [[-4096, 4096]], [[4096, 5000]], [[1, 4096]], [[0, 4096]] * 1025, [[0]], [0]],
    ids=lambda ranges: str(ranges[:1]),
)
def test_impossible_places_of_the_drivers_copy(ranges):
    identity = BODY["tree"]["root"]
    cuda = {"id": identity, "restore_tid": 5, "gpu_memory_bytes": {}, "host_copies": ranges}
    _corrupt(_with(cuda=[cuda]))
    assert manifests.decode(_with(cuda=[{**cuda, "host_copies": [[4096, 8192]]}]), "manifest.json").cuda[0].host_copies


def test_a_huge_file(tmp_path):
    """Refused before it is parsed, and without reading all of it."""
    image = tmp_path / "img"
    image.mkdir(mode=0o700)
    with (image / "manifest.json").open("wb") as file:
        file.truncate(100 << 20)
    (image / "manifest.json").chmod(0o600)
    with pytest.raises(ImageCorrupt, match="larger than"):
        directory.open_image(image)


def test_unknown_keys_are_no_reason_to_refuse():
    """A newer writer may add facts; what must not be ignored it names as a required feature."""
    assert manifests.decode(_with(weather="fine"), "manifest.json").format == 1


def test_places_that_hold_no_image(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nothing"):
        with pytest.raises(NotFound):
            directory.open_image(path)
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(ImageCorrupt, match=r"no manifest\.json"):
        directory.open_image(tmp_path / "empty")
    assert stat.S_ISDIR((tmp_path / "empty").stat().st_mode)

"""Encrypted images under attack by those who can write their files and have no key: nothing forged is opened."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpuckpt.flows import capturing, unsealing
from gpuckpt.flows.admission import Admission
from gpuckpt.flows.sealing import Sealing
from gpuckpt.images.framesource import verify_all
from gpuckpt.images.packindex import read_index
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt, ImageTooNew, Refused
from gpuckpt.model.facts import ProcessId
from gpuckpt.stores import directory
from gpuckpt.system import signatures
from tests.cli.cli_samples import manifest as sample_manifest
from tests.harness import gpuckpt
from tests.sealed_images import SECRET, age_key, make_sealed, reforge
from tests.small_images import make_image
from tests.sshd import ssh_keygen


@pytest.fixture
def here(tmp_path):
    """`image` and `other`, of the same recipient, and its `identity`."""
    identity, recipient = age_key(tmp_path / "identity")
    for seed, name in enumerate(("image", "other")):
        make_sealed(tmp_path / name, recipient, seed=seed)
    (tmp_path / "recipient").write_text(recipient)
    assert identity == tmp_path / "identity"
    return tmp_path


def read_all(here: Path, name: str = "image") -> None:
    """As a restore does: open, verify what is stored, read every frame."""
    view = unsealing.open_image(here / name, None, here / "identity")
    try:
        directory.verify(view.stored)
        index = read_index(view.image.part("packs/index"))
        with view.open_packs(index) as reader:
            verify_all(reader, index)
        assert view.image.part("criu/core-42.img").read_bytes().startswith(SECRET)
    finally:
        place = view.place.path
        view.close()
        assert not place.exists()


def test_who_has_the_key_reads_it_all(here):
    read_all(here)


def test_nothing_of_it_stands_in_its_files(here):
    """Neither content nor what the manifest says of the job: names, arguments, paths, variables, notes."""
    image, sample = here / "image", sample_manifest()
    texts = [path.read_bytes() for path in image.rglob("*") if path.is_file()]
    assert not any(SECRET in text for text in texts)
    names = {
        name
        for one in sample.tree.processes
        for name in (one.comm, one.exe, one.cwd, *one.argv, *one.environment_names)
    }
    names |= {file.path for file in sample.tree.files} | {"a note"}
    raw = (image / manifests.NAME).read_text()
    assert len(names) > 8
    assert [name for name in names if len(name) > 2 and json.dumps(name)[1:-1] in raw] == []


def test_equal_content_looks_different_in_each_image(here):
    """Nothing that is stored lets anybody try out a guess: no digest is one of the content."""
    recipient = (here / "recipient").read_text()
    twin = make_sealed(here / "twin", recipient, seed=0)
    listed = [json.loads((place / manifests.NAME).read_text())["parts"] for place in (here / "image", twin)]
    assert [part["size"] for part in listed[0] if part["path"].startswith("criu/")] == [
        part["size"] for part in listed[1] if part["path"].startswith("criu/")
    ]
    digests = [{part["blake3"] for part in parts} for parts in listed]
    assert digests[0] & digests[1] == set()


def copied(*names: str):
    """These files of the other image in place of its own."""

    def attack(here: Path) -> None:
        for name in names:
            shutil.copyfile(here / "other" / name, here / "image" / name)

    return attack


def swapped(here: Path) -> None:
    one, two = here / "image/criu/core-42.img", here / "image/criu/inventory.img"
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def cut_pack(here: Path) -> None:
    pack = max((here / "image/packs").glob("*.zst"))
    pack.write_bytes(pack.read_bytes()[:-1])


def added(here: Path) -> None:
    (here / "image/criu/more.img").write_bytes(b"more")


def removed(here: Path) -> None:
    (here / "image/files/log").unlink()


def pack_of_the_other(here: Path) -> None:
    """Under the name of its own, of the same size."""
    mine, others = (sorted((here / name / "packs").glob("*.zst")) for name in ("image", "other"))
    mine[0].write_bytes(others[0].read_bytes()[: mine[0].stat().st_size].ljust(mine[0].stat().st_size, b"\0"))


@pytest.mark.parametrize(
    "attack",
    [
        swapped,
        copied("criu/core-42.img"),
        copied("packs/index"),
        copied("key.age"),
        copied("manifest.sealed"),
        copied("key.age", "manifest.sealed"),
        copied("key.age", "manifest.sealed", "packs/index", "criu/core-42.img", "criu/inventory.img", "files/log"),
        cut_pack,
        added,
        removed,
        pack_of_the_other,
    ],
    ids=[
        "files swapped",
        "a file",
        "the index",
        "the key",
        "the manifest",
        "key and manifest",
        "all but the packs",
        "a pack cut",
        "a file added",
        "a file removed",
        "a pack of the other",
    ],
)
def test_files_of_another_image_are_not_taken(here, attack):
    attack(here)
    reforge(here / "image")
    with pytest.raises(ImageCorrupt):
        read_all(here)


def other_processes(tree):
    root = ProcessId(7, 7)
    return replace(tree, root=root, processes=(replace(tree.processes[0], id=root),), cuda=(), gpu_uses=())


def test_what_the_open_manifest_says_is_not_believed(here):
    other = json.loads((here / "other" / manifests.NAME).read_text())["image_id"]
    manifest = directory.open_image(here / "image")
    tree = manifest.manifest.tree
    manifest.close()
    for changes in (
        {"image_id": other},
        {"requires": ("packs", "encrypted", "open-files")},
        {"tree": other_processes(tree), "stopped": (), "cuda": ()},
    ):
        reforge(here / "image", **changes)
        with pytest.raises(ImageCorrupt):
            read_all(here)


def test_frames_stay_in_their_pack_and_place(here):
    """The index cannot be forged without the key; with one that lies the frames do not open."""
    view = unsealing.open_image(here / "image", None, here / "identity")
    try:
        index = read_index(view.image.part("packs/index"))
        first, second = index.packs
        one, two = index.files["pages-1.img"][0], index.files["pages-2.img"][1]
        exchanged = replace(index, packs=(replace(first, key=second.key), second))
        moved = replace(index, files={"pages-1.img": (replace(one, at=one.at + 1),)})
        taken = replace(index, files={"pages-1.img": (replace(two, digest=one.digest),)})
        for forged in (exchanged, moved, taken):
            with view.open_packs(forged) as reader, pytest.raises(ImageCorrupt):
                verify_all(reader, forged)
        assert first.key != second.key
        assert first.key.hex() not in repr(index)
        assert repr(first.key) not in repr(index)
    finally:
        view.close()


def test_an_image_in_clear_in_its_place_is_refused(here):
    """A downgrade: who names a key expects an image that needs it."""
    shutil.rmtree(here / "image")
    make_image(here / "image", 1)
    with pytest.raises(Refused, match="is not encrypted, and an --identity was given"):
        unsealing.open_image(here / "image", None, here / "identity")


@pytest.mark.parametrize("by", ["the command line", "a file"])
def test_a_key_from_a_configuration_is_at_hand_and_no_demand(here, by):
    """Of a plain image it opens nothing and is in nobody's way; typed for this one it is a mistake."""
    shutil.rmtree(here / "image")
    make_image(here / "image", 1)
    (here / "config.toml").write_text(f'[restore]\nidentity = "{here}/identity"\n')
    typed = ("--identity", here / "identity") if by == "the command line" else ()
    env = {"GPUCKPT_CONFIG": str(here / "config.toml")}
    answer = gpuckpt("restore", here / "image", "--dry-run", *typed, env=env)
    why = answer.report["error"]["message"] if answer.report["error"] else ""
    assert ("is not encrypted" in why) == bool(typed), answer.error
    assert ("comes from" in answer.error) is False


def test_a_refusal_for_a_value_of_a_file_names_the_file(here):
    (here / "wrong").write_text((here / "identity").read_text().replace("AGE-SECRET-KEY-1", "AGE-SECRET-KEY-1Q"))
    (here / "wrong").chmod(0o600)
    (here / "config.toml").write_text(f'[restore]\nidentity = "{here}/wrong"\n')
    answer = gpuckpt("restore", here / "image", env={"GPUCKPT_CONFIG": str(here / "config.toml")})
    assert answer.status == 20
    assert answer.report["error"]["hint"].endswith(f"identity comes from {here}/config.toml")


def test_older_versions_refuse_it(here, monkeypatch):
    monkeypatch.setattr(manifests, "KNOWN_FEATURES", manifests.KNOWN_FEATURES - {"encrypted"})
    with pytest.raises(ImageTooNew, match="encrypted"):
        directory.open_image(here / "image")


def test_a_signature_of_another_image_is_none(here):
    ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", here / "ops")
    (here / "allowed").write_text(f"ops {(here / 'ops.pub').read_text()}")
    raw = (here / "other" / manifests.NAME).read_bytes()
    signature = signatures.sign(here / "ops", raw)
    for name, good in (("other", True), ("image", False)):
        (here / name / manifests.SIGNATURE).write_bytes(signature)
        admission = Admission(here / "allowed")
        if good:
            unsealing.open_image(here / name, admission, here / "identity").close()
            assert admission.signer.principal == "ops"
            continue
        with pytest.raises(Refused, match="does not fit the image"):
            unsealing.open_image(here / name, admission, here / "identity")
    reforge(here / "other", notes=("altered after it was signed",))
    with pytest.raises(Refused, match="does not fit the image"):
        unsealing.open_image(here / "other", Admission(here / "allowed"), here / "identity")


def test_a_host_can_demand_signatures_and_parses_nothing_before(here):
    """By its configuration: what nobody has signed is refused (20) however broken it is, not called corrupt (60)."""
    ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", here / "ops")
    (here / "allowed").write_text(f"ops {(here / 'ops.pub').read_text()}")
    (here / "config.toml").write_text(f'[restore]\nallowed-signers = "{here}/allowed"\n')
    (here / "image" / manifests.NAME).write_bytes(b"{ no manifest at all")
    for configuration, status in ((here / "config.toml", 20), (Path("/dev/null"), 60)):
        answer = gpuckpt("restore", here / "image", env={"GPUCKPT_CONFIG": str(configuration)})
        assert (answer.status, answer.report["process"]) == (status, "untouched"), answer.error


@pytest.mark.parametrize("identity", ["identity", "wrong", None])
def test_a_base_whose_packs_were_exchanged_is_not_taken_over(here, identity):
    """Its open manifest can be made to fit them; a new image would be whole by its own words, and no restore would take it."""
    age_key(here / "wrong")
    pack = min((here / "image/packs").glob("*.zst"))
    pack.write_bytes(bytes(pack.stat().st_size))
    reforge(here / "image")
    base = directory.open_image(here / "image")
    try:
        directory.verify(base)
        notes: list[str] = []
        sealing = Sealing.of(((here / "recipient").read_text(),))
        found = capturing._read_base(base, 2, notes, here / identity if identity else None, sealing)
        assert found is None
        assert len(notes) == 1
        assert {"identity": "is not what its name says", "wrong": "does not open", None: "no --identity"}[
            identity
        ] in notes[0]
    finally:
        base.close()

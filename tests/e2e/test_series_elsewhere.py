"""A series on another host: looked at, and its newest image reached by DIR/latest, through gpuckpt and SFTP alone."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from gpuckpt.model.manifest import NAME, SIGNATURE
from gpuckpt.model.series import member_name
from gpuckpt.stores import protection
from gpuckpt.system import signatures
from tests import harness, packing
from tests.harness import gpuckpt
from tests.small_images import content_of, make_image
from tests.sshd import REMOTE_COMMAND, ROOT, ssh_keygen
from tests.transferring import pull

NOW = 1_796_000_000
UNSEEN = {"bytes_on_disk", "bytes_unshared", "copies"}
"""What no SFTP tells."""

both = pytest.mark.parametrize("host", ["far", "bare"])


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Path:
    """Three images, each with the packs of the one before, `latest`, one with another name, and what is no image."""
    place = tmp_path_factory.mktemp("series")
    made: list[Path] = []
    for number in range(3):
        base = made[-1] if made else None
        made.append(make_image(place / member_name("job", NOW + number), 0.1, seed=number + 1, packs=1, base=base))
    make_image(place / "engine", 0.1, seed=9, packs=1)
    protection.note(made[0], "spare", "/srv/copy", "BLAKE3 of every byte")
    (place / "latest").symlink_to(made[-1].name)
    (place / "out").symlink_to("/etc")
    (place / "other").mkdir()
    (place / "other" / "manifest.json").write_text("{}")
    shutil.copytree(made[0], place / "job-20261130T999999Z.partial")
    return place


def inspect(sshd, place: object, *options: object, host: str, command: str = REMOTE_COMMAND) -> harness.Answer:
    remote = [] if host == "bare" else ["--remote-command", command]
    return gpuckpt("inspect", f"{host}:{place}", "--ssh-config", sshd.config, *remote, *options)


def without(data: dict, place: str, *names: str) -> dict:
    """The listing, but for these keys, its places from `place` on."""
    images = [
        {key: value.removeprefix(place) if key == "path" else value for key, value in image.items() if key not in names}
        for one in data["series"]
        for image in one["images"]
    ]
    assert data["path"] == place
    return {"latest": data["latest"], "names": [one["name"] for one in data["series"]], "images": images}


@both
def test_it_is_shown_as_it_is_there(sshd, series, host):
    here = gpuckpt("inspect", series).report["data"]
    answer = inspect(sshd, series, host=host)
    assert answer.status == 0, answer.stderr
    there = answer.report["data"]
    unseen = UNSEEN if host == "bare" else set()
    assert without(there, f"{host}:{series}", *unseen) == without(here, str(series), *unseen)
    assert len(without(here, str(series))["images"]) == 4
    for image in (image for one in there["series"] for image in one["images"]):
        assert all((image[name] is None) == (name in unseen) for name in UNSEEN)


@both
def test_what_is_damaged_there_is_a_line_and_every_byte_can_be_read(sshd, series, tmp_path, host):
    place = tmp_path / "series"
    shutil.copytree(series, place, symlinks=True)
    names = [member_name("job", NOW + number) for number in range(3)]
    next((place / names[0] / "packs").glob("*.zst")).unlink()
    flipped = packing.flip(place / names[1], 0.5)
    answer = inspect(sshd, place, "--verify", host=host)
    assert answer.status == 0, answer.stderr
    found = {image["name"]: image for one in answer.report["data"]["series"] for image in one["images"]}
    assert "is missing" in found[names[0]]["damage"]
    assert flipped in found[names[1]]["damage"]
    assert [found[name]["verified"] for name in names] == [False, False, True]


@both
def test_latest_is_pulled_under_the_name_of_its_image(sshd, series, tmp_path, host):
    name = os.readlink(series / "latest")
    pulled = pull(sshd, series / "latest", tmp_path / "here", host=host)
    assert pulled.status == 0, pulled.stderr
    assert pulled.report["data"]["location"] == str(tmp_path / "here" / name)
    assert content_of(tmp_path / "here" / name) == content_of(series / name)
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [name]
    looked = inspect(sshd, series / "latest", host=host)
    assert (looked.status, looked.report["data"]["kind"]) == (0, "image")


@pytest.mark.parametrize(("host", "target"), [("far", "../series/x"), ("bare", "out")])
def test_a_link_that_leads_elsewhere_is_refused(sshd, series, tmp_path, host, target):
    (tmp_path / "latest").symlink_to(target)
    (tmp_path / "out").symlink_to(series / "engine")
    answer = pull(sshd, tmp_path / "latest", tmp_path / "here", host=host)
    assert answer.status == 20, answer.stderr
    assert f"leads to {target}, which is no image in that directory" in answer.error["message"]
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(("host", "verb"), [("far", "restore"), ("bare", "pull")])
def test_who_means_an_image_and_names_the_series_gets_the_command_for_the_newest(sshd, series, tmp_path, host, verb):
    command = [] if host == "bare" else ["--remote-command", REMOTE_COMMAND]
    target = (tmp_path,) if verb == "pull" else ()
    answer = gpuckpt(verb, f"{host}:{series}", *target, "--ssh-config", sshd.config, *command)
    assert (answer.status, answer.report["process"]) == (20, "untouched"), answer.stderr
    assert "is a series of images, not an image" in answer.error["message"]
    newest = os.readlink(series / "latest")
    whole = " ".join(["gpuckpt", verb, f"{host}:{series}/{newest}", *map(str, target)])
    assert answer.error["hint"].endswith(f"for the newest: {whole}")


def test_an_older_gpuckpt_there_says_what_it_cannot(sshd, series, tmp_path):
    command = f"PYTHONPATH={ROOT} {sys.executable} {harness.PROGRAMS / 'lying_serve.py'} older"
    listed = inspect(sshd, series, host="far", command=command)
    assert listed.status == 20
    assert "is older and lists no series" in listed.error["hint"]
    where = (f"far:{series}/latest", tmp_path, "--ssh-config", sshd.config, "--remote-command", command)
    pulled = gpuckpt("pull", *where)
    assert pulled.status == 10
    assert "is older and does not say which image" in pulled.error["message"]
    assert inspect(sshd, series / "latest", host="far", command=command).status == 0


@pytest.mark.parametrize("kind", ["name", "numbers"])
def test_a_far_side_that_lies_about_a_series(sshd, series, tmp_path, kind):
    command = f"PYTHONPATH={ROOT} {sys.executable} {harness.PROGRAMS / 'lying_serve.py'} {kind}"
    where = ("--ssh-config", sshd.config, "--remote-command", command)
    if kind == "name":
        (tmp_path / "here").mkdir(mode=0o700)
        answer = gpuckpt("pull", f"far:{series}/latest", tmp_path / "here", *where)
    else:
        answer = gpuckpt("inspect", f"far:{series}", *where)
    assert answer.status == 50, answer.stderr
    assert "do not trust it" in answer.error["hint"]
    assert [path.name for path in tmp_path.rglob("*")] in ([], ["here"])


@pytest.fixture
def signed(tmp_path) -> Path:
    """Two images, of which one is signed by who may, a third by another; the list of who may is `allowed`."""
    for name in ("ops", "other"):
        ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name)
    (tmp_path / "allowed").write_text(f"ops {(tmp_path / 'ops.pub').read_text()}")
    (tmp_path / "images").mkdir()
    for number, name in enumerate(("good", "bare", "forged")):
        make_image(tmp_path / "images" / name, 0.1, seed=number + 1, packs=1)
    for name, key in (("good", "ops"), ("forged", "other")):
        image = tmp_path / "images" / name
        (image / SIGNATURE).write_bytes(signatures.sign(tmp_path / key, (image / NAME).read_bytes()))
    return tmp_path


@pytest.mark.parametrize("verify", [(), ("--verify",)])
def test_of_images_that_nobody_signed_who_may_nothing_is_believed(signed, verify):
    answer = gpuckpt("inspect", signed / "images", "--allowed-signers", signed / "allowed", *verify)
    assert answer.status == 0, answer.stderr
    [series] = answer.report["data"]["series"]
    seen = {one["name"]: (one["complete"], one["program"], one["damage"]) for one in series["images"]}
    assert seen["good"][0]
    assert seen["good"][1]
    for name, why in (("bare", "is not signed"), ("forged", "its signer is not among them")):
        assert seen[name][:2] == (False, None)
        assert why in seen[name][2]


def test_a_list_of_signers_that_is_not_there_is_said_once(signed):
    answer = gpuckpt("inspect", signed / "images", "--allowed-signers", signed / "none")
    assert (answer.status, "no such list of signers" in answer.error["message"]) == (21, True), answer.error


@both
def test_whose_the_images_elsewhere_are_is_seen_one_by_one(sshd, signed, host):
    signers = ("--allowed-signers", signed / "allowed")
    assert inspect(sshd, signed / "images/good", *signers, host=host).report["data"]["signed_by"]["principal"] == "ops"
    for name in ("images/bare", "images/forged"):
        answer = inspect(sshd, signed / name, *signers, host=host)
        assert (answer.status, "signe" in answer.error["message"]) == (20, True), answer.error
    answer = inspect(sshd, signed / "images", *signers, host=host)
    assert (answer.status, "several images there" in answer.error["hint"]) == (60, True), answer.error

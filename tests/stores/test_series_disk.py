"""A series on a real disk: what is looked at, locked, linked and removed, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.flows.pruning import Pruning
from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import Busy, NotFound, Refused
from gpuckpt.model.series import MinFree, Rules, member_name
from gpuckpt.stores import directory, partialimage
from gpuckpt.stores import series as stored
from tests.small_images import make_image

NOW = 1_796_000_000


@pytest.fixture
def place(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def members(place: Path, count: int, name: str = "job", *, shared: bool = False) -> list[Path]:
    """A series of small images, oldest first; `shared`: each has the packs of the one before it, too."""
    made: list[Path] = []
    for number in range(count):
        base = made[-1] if made and shared else None
        made.append(make_image(place / member_name(name, NOW + number), 0.05, seed=number, packs=1, base=base))
    return made


def left(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


# Looking


def test_a_whole_image_is_described(place):
    image = members(place, 1)[0]
    partialimage.sync(image)
    found = stored.look(image)
    assert (found.damage, found.generation, found.root_pid) == ("", 2, 4242)
    assert found.program.startswith("/usr/bin/python3 -m vllm")
    assert found.bytes_on_disk == found.bytes_unshared > 50_000


def test_what_is_shared_is_not_what_an_image_adds(place):
    old, new = (stored.look(image) for image in members(place, 2, shared=True))
    pack = next(file.bytes for file in old.files.values() if file.links == 2)
    assert pack > 0
    assert old.bytes_on_disk - old.bytes_unshared == pack
    assert new.bytes_on_disk - new.bytes_unshared == pack


def _cut_part(image):
    with next((image / "packs").glob("*.zst")).open("r+b") as file:
        file.truncate(10)


def _newer_format(image):
    raw = json.loads((image / manifests.NAME).read_text())
    (image / manifests.NAME).write_text(json.dumps({**raw, "format": 99}))


DAMAGES = {
    "no manifest.json in it": lambda image: (image / manifests.NAME).unlink(),
    "not whole JSON": lambda image: (image / manifests.NAME).write_text("{"),
    "has 10 bytes, the manifest says": _cut_part,
    "packs/index is missing": lambda image: (image / "packs" / "index").unlink(),
    "image format 99": _newer_format,
    "can be written to by others": lambda image: image.chmod(0o777),
    "is no regular file": lambda image: ((image / manifests.NAME).unlink(), os.mkfifo(image / manifests.NAME)),
    "cannot be read": lambda image: ((image / manifests.NAME).unlink(), (image / manifests.NAME).symlink_to("/dev/zero")),
}  # fmt: skip


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_image_is_an_answer_not_a_failure(place, words):
    image = members(place, 1)[0]
    DAMAGES[words](image)
    assert words in stored.look(image).damage


def test_an_image_that_is_gone_by_now_is_an_answer_too(place):
    assert "no such image" in stored.look(place / "job-20261130T005320Z").damage


def test_only_directories_with_a_name_of_the_series_are_of_it(place):
    mine = members(place, 2)
    members(place, 1, "other")
    (place / member_name("job", NOW + 50)).symlink_to(mine[0].name)
    (place / member_name("job", NOW + 51)).touch()
    (place / "job-extra").mkdir()
    (place / "plain").mkdir()
    assert stored.members_in(place, "job") == [path.name for path in mine]


def test_a_directory_of_images_lists_whatever_is_one(place):
    mine = members(place, 1)
    make_image(place / "by-hand", 0.05)
    (place / "no-image").mkdir()
    (place / member_name("job", NOW + 1)).mkdir()
    (place / (member_name("job", NOW + 2) + ".partial")).mkdir()
    assert stored.images_in(place) == ["by-hand", mine[0].name, member_name("job", NOW + 1)]


@pytest.mark.parametrize(("name", "kind"), [("nothing", NotFound), ("file", NotFound)])
def test_a_place_that_is_none(place, name, kind):
    (place / "file").touch()
    with pytest.raises(kind, match=name):
        stored.names_in(place / name)
    with pytest.raises(kind), stored.alone(place / name, "job"):
        pass


# The lock

HOLD = """
import sys
from pathlib import Path
from gpuckpt.stores import series
with series.alone(Path(sys.argv[1]), "job"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_told_who_works_since_when(place):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Busy, match=rf"pid {holder.pid}\) has been working on the series {place}/job since \d\d:"):
            _enter(place, "job")
        _enter(place, "other")
        holder.kill()
        holder.wait()
        _enter(place, "job")
    finally:
        holder.kill()
        holder.communicate()


def _enter(place, name):
    with stored.alone(place, name):
        pass


def test_a_lock_that_is_none(place):
    os.mkfifo(place / ".fifo.lock")
    (place / ".dir.lock").mkdir()
    (place / ".link.lock").symlink_to("/dev/null")
    for name in ("fifo", "dir", "link"):
        with pytest.raises(Refused, match=rf"\.{name}\.lock"):
            _enter(place, name)


# The link


def test_the_link_leads_to_the_newest_in_one_step(place):
    one, two = members(place, 2)
    stored.point_latest(place, "job", one.name)
    (place / ".job.latest.new").symlink_to("left by a killed run")
    stored.point_latest(place, "job", two.name)
    assert (place / "latest").resolve() == two
    assert left(place) == {one.name, two.name, "latest"}
    stored.refuse_other_latest(place)


def test_what_is_no_link_is_not_replaced(place):
    (place / "latest").mkdir()
    with pytest.raises(Refused, match="is no link to an image"):
        stored.refuse_other_latest(place)


# Removing


def test_an_image_is_removed_whole(place):
    one, two = members(place, 2, shared=True)
    stored.remove(one)
    assert left(place) == {two.name}
    image = directory.open_image(two)
    directory.verify(image)
    image.close()


@pytest.mark.parametrize("reader", [directory.open_image, directory.open_for_removal])
def test_an_image_that_somebody_has_open_stays(place, reader):
    one = members(place, 1)[0]
    image = reader(one)
    with pytest.raises(Busy):
        stored.remove(one)
    image.close()
    stored.remove(one)
    assert left(place) == set()


def test_who_opens_an_image_on_its_way_out_is_told_so(place):
    """Between its removal and the end of its lock, and after that with the manifest open already."""
    one = members(place, 1)[0]
    image = directory.open_for_removal(one)
    with pytest.raises(Busy, match="is being removed"):
        directory.open_image(one)
    descriptor = os.open(one / manifests.NAME, os.O_RDONLY)
    shutil.rmtree(one)
    image.close()
    with pytest.raises(NotFound, match="has just been removed"):
        directory._refuse_removed(one, descriptor)
    os.close(descriptor)


def test_what_killed_runs_left_is_cleared_and_nothing_else(place):
    one = members(place, 1)[0]
    names = {kind: member_name("job", NOW + 100 + number) + ".partial" for number, kind in enumerate(
        ["dead", "live", "arriving", "link", "file"]
    )}  # fmt: skip
    foreign = member_name("other", NOW) + ".partial"
    for name in (names["dead"], names["live"], names["arriving"], foreign):
        (place / name).mkdir()
    (place / names["dead"] / "criu").mkdir()
    (place / names["arriving"] / "incoming").touch()
    (place / names["link"]).symlink_to(one.name)
    (place / names["file"]).touch()
    lock = partialimage.lock_partial(place / names["live"])
    notes = stored.clear_partials(place, "job")
    os.close(lock)
    assert [names["dead"] in note for note in notes] == [True]
    assert left(place) == {one.name, foreign, *names.values()} - {names["dead"]}


# Which go, on the disk


def prune(place: Path, rules: Rules, newest: Path) -> Pruning:
    work = Pruning(place, "job", rules)
    work.prune(newest.name)
    return work


def test_the_oldest_go_and_strangers_stay(place):
    images = members(place, 5)
    others = members(place, 2, "other")
    (place / member_name("job", 5)).symlink_to(images[0].name)
    (place / member_name("job", 6)).touch()
    (place / "notes").mkdir()
    work = prune(place, Rules(keep=2), images[-1])
    assert work.removed == [image.name for image in images[:3]]
    assert not work.findings
    assert left(place) == {
        *(path.name for path in (*images[3:], *others)), member_name("job", 5), member_name("job", 6), "notes",
    }  # fmt: skip


def test_a_damaged_image_counts_for_nothing_and_stays(place):
    """Two whole images stay although two damaged ones are newer than one of them."""
    images = members(place, 5)
    for damaged in (images[2], images[3]):
        (damaged / manifests.NAME).unlink()
    prune(place, Rules(keep=2), images[-1])
    assert left(place) == {image.name for image in images[1:]}


def test_nothing_goes_where_the_newest_is_damaged(place):
    images = members(place, 3)
    (images[-1] / "packs" / "index").unlink()
    work = prune(place, Rules(keep=1), images[-1])
    assert (work.removed, [finding.id for finding in work.findings]) == ([], ["series-prune"])
    assert len(left(place)) == 3


def test_what_is_in_use_stays_and_is_named(place):
    images = members(place, 4)
    reading = directory.open_image(images[1])
    work = prune(place, Rules(keep=1), images[-1])
    reading.close()
    assert work.removed == [images[0].name, images[2].name]
    assert [images[1].name in note for note in work.notes] == [True]


def test_the_image_that_latest_leads_to_stays(place):
    images = members(place, 3)
    stored.point_latest(place, "job", images[0].name)
    assert prune(place, Rules(keep=1), images[-1]).removed == [images[1].name]


def test_an_image_that_others_can_write_to_is_not_removed_as_root(place):
    """Nor one of another user: what is in it is not what gpuckpt has put there."""
    images = members(place, 3)
    os.chown(images[0] / "criu" / "inventory.img", 65534, 65534)
    assert prune(place, Rules(keep=1), images[-1]).removed == [images[1].name]


@pytest.fixture
def small_disk(place):
    """A file system of 8 MiB with hard links."""
    disk = place / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_the_oldest_go_until_enough_is_free_and_shared_packs_free_nothing(small_disk):
    """Each has the packs of all before it: what goes frees only what it has alone."""
    images = members(small_disk, 5, shared=True)
    alone = [stored.look(image).bytes_unshared for image in images]
    free = stored.space(small_disk).free_bytes
    wanted = free + alone[0] + 4096
    work = prune(small_disk, Rules(min_free=MinFree(bytes=wanted)), images[-1])
    assert work.removed == [image.name for image in images[:2]]
    assert stored.space(small_disk).free_bytes >= wanted
    assert not work.findings


def test_what_has_gone_counts_when_it_is_thought_over_again(small_disk):
    """The first and the third share a pack: once the first has gone, the third frees it. The second is in use."""
    images = [make_image(small_disk / member_name("job", NOW + n), 0.05, seed=n, packs=1) for n in range(2)]
    images.append(make_image(small_disk / member_name("job", NOW + 2), 0.05, seed=2, packs=1, base=images[0]))
    images += [make_image(small_disk / member_name("job", NOW + n), 0.05, seed=n, packs=1) for n in (3, 4)]
    first, _, third, *_ = (stored.look(image) for image in images)
    pack = first.bytes_on_disk - first.bytes_unshared
    wanted = stored.space(small_disk).free_bytes + first.bytes_unshared + third.bytes_unshared + pack // 2
    reading = directory.open_image(images[1])
    work = prune(small_disk, Rules(min_free=MinFree(bytes=wanted)), images[-1])
    reading.close()
    assert work.removed == [images[0].name, images[2].name]


def test_the_newest_stays_on_a_full_disk_and_the_lack_is_said(small_disk):
    images = members(small_disk, 3)
    work = prune(small_disk, Rules(keep=3, min_free=MinFree(share=0.999)), images[-1])
    assert work.removed == [image.name for image in images[:2]]
    assert [finding.id for finding in work.findings] == ["series-free"]
    assert left(small_disk) == {images[-1].name}


def test_a_disk_that_has_become_read_only_is_a_warning(small_disk):
    images = members(small_disk, 3)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    work = prune(small_disk, Rules(keep=1), images[-1])
    assert [finding.id for finding in work.findings] == ["series-prune"]
    assert "Read-only file system" in work.findings[0].found
    assert len(left(small_disk)) == 3


@pytest.mark.parametrize("target", ["/etc", "../job", "..", "out", "job-20261130T140526Z/criu"])
def test_a_link_to_the_newest_that_leads_elsewhere_is_not_followed(place, target):
    (place / "out").symlink_to("/etc")
    (place / "latest").symlink_to(target)
    with pytest.raises(Refused, match=f"leads to {target}, which is no image in that directory"):
        stored.behind_latest(place / "latest")


def test_the_newest_has_a_name_of_its_own(place):
    image = members(place, 1)[0]
    stored.point_latest(place, "job", image.name)
    assert stored.behind_latest(place / "latest") == image
    assert stored.behind_latest(place / "other") == place / "other"


# Its words where an image is meant


def test_a_series_is_no_image(place):
    images = members(place, 2)
    with pytest.raises(Refused, match="is a series of images, not an image") as caught:
        directory.open_image(place)
    assert f"the newest is {images[1]}" in caught.value.hint
    stored.point_latest(place, "job", images[0].name)
    with pytest.raises(Refused) as caught:
        directory.open_image(place)
    assert f"the newest is {place}/latest" in caught.value.hint


def test_damage_on_the_disk_is_seen_behind_the_cache(place):
    """The file as the disk has it, not as memory does: a file system on a file, which is changed beneath it."""
    disk, mounted = place / "disk", place / "mounted"
    mounted.mkdir()
    with disk.open("wb") as file:
        file.truncate(16 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", disk], capture_output=True).returncode == 0
    if not made or subprocess.run(["mount", "-o", "loop", disk, mounted], capture_output=True).returncode:
        pytest.skip("no loop device here")
    try:
        _damage_beneath(disk, mounted)
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)


def _damage_beneath(disk: Path, mounted: Path) -> None:
    marked = mounted / "part"
    marked.write_bytes(b"gpuckpt!" * 4096)
    with marked.open("rb") as file:
        os.fsync(file.fileno())
    whole = directory.digest(marked)
    at = disk.read_bytes().find(b"gpuckpt!" * 512)
    with disk.open("r+b") as file:
        file.seek(at)
        file.write(b"damaged!")
        os.fsync(file.fileno())
    assert directory.digest(marked) == whole
    assert directory.digest(marked, from_disk=True) != whole

"""Images that hold secrets: encrypted and signed, they tell nothing to those who carry them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

import pytest

from tests import harness
from tests.e2e import rounds
from tests.e2e.rounds import SETTLE, explain, goes_on
from tests.harness import PROGRAMS, gpuckpt, numbers, wait_for_count
from tests.programs.secret_places import PLACES
from tests.sealed_images import age_key
from tests.sshd import ssh_keygen

pytestmark = pytest.mark.criu

MIB = 1 << 20


def in_clear() -> list[Path]:
    """What lies in memory of what is encrypted on the disk, of all tests that run now."""
    return list(Path("/dev/shm").glob("gpuckpt-secret-*"))


def nothing_is_left() -> None:
    """No place in memory without a process that works with it."""
    harness.wait_for(lambda: not any(is_free(place) for place in in_clear()), "nothing lies in clear")


def is_free(place: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        return place.exists()
    return False


def signer(where: Path, name: str) -> tuple[object, ...]:
    """Make the key `name`; returns the option that lets only NAME@cluster pass."""
    ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", where / name)
    allowed = where / f"{name}.allowed"
    allowed.write_text(f"{name}@cluster {(where / f'{name}.pub').read_text()}")
    return "--allowed-signers", allowed


def found(root: Path, key: str) -> set[str]:
    """The places whose secret stands in any file, name or link below `root`."""
    texts = [str(path.relative_to(root)).encode() for path in root.rglob("*")]
    texts += [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    return {place for place, form in PLACES.items() if any(form.format(key).encode() in text for text in texts)}


def test_an_encrypted_signed_image_goes_over_a_bare_host_and_tells_it_nothing(two_hosts, tmp_path):
    a, b = two_hosts.a, two_hosts.b
    key = secrets.token_hex(12)
    identity, recipient = age_key(tmp_path / "identity")
    signers = {name: signer(tmp_path, name) for name in ("ops", "other")}
    environment = ["env", f"SECRET_IN_ENVIRONMENT=E-{key}"]
    program = [shutil.which("python3"), PROGRAMS / "secretive.py", "/srv/log", f"/srv/N-{key}", f"A-{key}"]
    pid = a.daemon(*environment, *program)
    wait_for_count(a.outside("/srv/log"), 3)
    plain = a.gpuckpt("dump", "--tree", pid, "/srv/plain", "--leave-running", "--level", "none", "--keep-argv", *SETTLE)
    assert plain.status == 0, explain(plain)
    assert found(a.outside("/srv/plain"), key) == set(PLACES), (
        "what is searched for can be found where nothing is sealed"
    )
    sealing = ("--encrypt-to", recipient, "--sign-key", tmp_path / "ops", "--capture-files", "writable", "--keep-argv")
    dumped = a.gpuckpt("dump", "--tree", pid, "/srv/image", *sealing, "--level", "none", *SETTLE)
    assert dumped.status == 0, explain(dumped)
    assert found(a.outside("/srv/image"), key) == set()

    # A store with nothing but sshd, which both reach; the image is nowhere else then.
    bare = ("--ssh-config", two_hosts.config)
    pushed = a.gpuckpt("push", "/srv/image", "a:/srv/store", "--delete-source", *bare)
    assert pushed.status == 0, explain(pushed)
    assert any("over SFTP" in note for note in pushed.report["data"]["notes"])
    assert found(a.outside("/srv/store/image"), key) == set()
    refused = b.gpuckpt("pull", "a:/srv/store/image", "/srv", *bare, *signers["other"])
    assert refused.status == 20
    assert "its signer is not among them" in refused.error["message"]
    pulled = b.gpuckpt("pull", "a:/srv/store/image", "/srv", *bare, *signers["ops"])
    assert pulled.status == 0, explain(pulled)
    assert found(b.outside("/srv/image"), key) == set()

    wrong = age_key(tmp_path / "wrong")[0]
    for options, why in (
        (("--identity", identity, *signers["other"]), "its signer is not among them"),
        ((), "is encrypted"),
        (("--identity", wrong, *signers["ops"]), "does not open the image"),
    ):
        refused = b.gpuckpt("restore", "/srv/image", *options, *SETTLE)
        assert (refused.status, refused.report["process"]) == (20, "untouched")
        assert why in refused.error["message"]
    mine = ("--identity", identity, *signers["ops"])
    b.outside("/srv/log").write_bytes(a.outside("/srv/log").read_bytes())
    at_dump = numbers(b.outside("/srv/log"))[-1]
    restored = b.gpuckpt("restore", "/srv/image", *mine, *SETTLE)
    assert restored.status == 0, explain(restored)
    goes_on(b.outside("/srv/log"), at_dump)
    assert f"C-{key}" in b.outside(f"/srv/N-{key}").read_text()


def test_memory_is_injected_and_shared_with_a_base(work, jobs):
    identity, recipient = age_key(work / "identity")
    job = jobs.python("memory.py", "private", work / "log", 80)
    wait_for_count(work / "log", 1)
    to = ("--encrypt-to", recipient)
    first = rounds.dump(jobs, job.pid, work / "first", *to, "--leave-running")
    assert first.report["data"]["bytes_shared"] == 0
    without = rounds.dump(jobs, job.pid, work / "without", *to, "--leave-running", "--base", work / "first")
    assert without.report["data"]["bytes_shared"] == 0
    assert any("no --identity was given" in note for note in without.report["data"]["notes"])
    base = ("--base", work / "first", "--identity", identity)
    clear = rounds.dump(jobs, job.pid, work / "clear", *base, "--leave-running")
    assert any("it is encrypted, and this image is not" in note for note in clear.report["data"]["notes"])
    second = rounds.dump(jobs, job.pid, work / "second", *to, *base)
    assert second.report["data"]["bytes_shared"] > 30 * MIB, explain(second)
    at_dump = numbers(work / "log")[-1]
    nothing_is_left()
    looked = gpuckpt("inspect", work / "second", "--verify", "--identity", identity)
    assert looked.status == 0, explain(looked)
    assert looked.report["data"]["manifest"]["tree"]["processes"][0]["argv"][-1] == "80"
    restored = rounds.restore(jobs, work / "second", "--identity", identity)
    assert restored.report["data"]["bytes_injected"] > 40 * MIB
    goes_on(work / "log", at_dump, more=2)
    nothing_is_left()


@pytest.mark.parametrize("wrong", ["another key", "no key"])
def test_a_series_whose_key_is_the_wrong_one_is_not_called_damaged(work, jobs, wrong):
    """The old image is good: it goes by the rules, and nobody is told to remove it."""
    _, recipient = age_key(work / "identity")
    identity = age_key(work / "other")[0] if wrong == "another key" else work / "missing"
    job = jobs.start("/bin/sleep", "1000")
    place = work / "series"
    place.mkdir(mode=0o700)
    into = ("dump", "--tree", job.pid, "--leave-running", "--into", place, "--name", "job", "--keep", "1")
    first = gpuckpt(*into, "--encrypt-to", recipient, *SETTLE)
    second = gpuckpt(*into, "--encrypt-to", recipient, "--identity", identity, *SETTLE)
    assert (first.status, second.status) == (0, 0), explain(second)
    series = second.report["data"]["series"]
    assert "series-damaged" not in second.finding_ids
    assert series["base"] is None
    assert str(identity) in series["full"]
    assert series["removed"] == [Path(first.report["data"]["image"]).name]


def test_nothing_lies_in_clear_while_the_job_is_waited_for(work, jobs):
    identity, recipient = age_key(work / "identity")
    job = jobs.python("counter.py", work / "log")
    wait_for_count(work / "log", 3)
    before = set(in_clear())
    rounds.dump(jobs, job.pid, work / "image", "--encrypt-to", recipient)
    waiting = harness.start_gpuckpt("restore", work / "image", "--identity", identity, "--wait", *SETTLE)
    jobs.own(waiting)
    harness.wait_for(lambda: harness.alive(job.pid), "it comes up")
    jobs.adopt(job.pid)
    wait_for_count(work / "log", numbers(work / "log")[-1] + 1)
    harness.wait_for(
        lambda: not any(list(place.rglob("*")) for place in set(in_clear()) - before), "nothing lies in clear"
    )
    assert harness.alive(job.pid)
    os.kill(job.pid, 9)
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + 9, out
    nothing_is_left()


def test_over_the_wire(work, jobs, sshd):
    from tests.e2e.test_restore_from_elsewhere import reach

    identity, recipient = age_key(work / "identity")
    job = jobs.python("memory.py", "private", work / "log", 64)
    wait_for_count(work / "log", 1)
    signers = {name: signer(work, name) for name in ("ops", "other")}
    sealing = ("--encrypt-to", recipient, "--sign-key", work / "ops")
    rounds.dump(jobs, job.pid, work / "image", *sealing, "--level", "none")
    at_dump = numbers(work / "log")[-1]
    where = ("restore", f"far:{work}/image", *reach(sshd), *SETTLE)
    for options in (signers["ops"], (*signers["other"], "--identity", identity)):
        refused = gpuckpt(*where, *options)
        assert (refused.status, refused.report["process"]) == (20, "untouched"), explain(refused)
    restored = gpuckpt(*where, *signers["ops"], "--identity", identity)
    assert restored.report["data"]["signed_by"]["principal"] == "ops@cluster"
    jobs.adopt(*restored.report["data"].get("pids", ()))
    assert restored.status == 0, explain(restored)
    assert restored.report["data"]["bytes_injected"] > 30 * MIB
    goes_on(work / "log", at_dump, more=2)
    nothing_is_left()


def test_a_killed_dump_leaves_nothing_in_clear(work, jobs):
    _, recipient = age_key(work / "identity")
    job = jobs.python("memory.py", "private", work / "log", 200)
    wait_for_count(work / "log", 1)
    dump = harness.start_gpuckpt(
        "dump", "--tree", job.pid, work / "image", "--encrypt-to", recipient, "--level", 9, *SETTLE
    )
    named = f"criu/*-{job.pid}.img"
    [mine] = harness.wait_for(lambda: [one for one in in_clear() if any(one.glob(named))], "CRIU's files lie in clear")
    os.kill(dump.pid, 9)
    dump.communicate()
    goes_on(work / "log", numbers(work / "log")[-1], more=2)
    harness.wait_for(lambda: not mine.exists(), "the owner removes them")


def test_a_killed_restore_leaves_nothing_in_clear(work, jobs):
    identity, recipient = age_key(work / "identity")
    job = jobs.python("memory.py", "private", work / "log", 64)
    wait_for_count(work / "log", 1)
    rounds.dump(jobs, job.pid, work / "image", "--encrypt-to", recipient)
    restore = harness.start_gpuckpt("restore", work / "image", "--identity", identity, *SETTLE)
    [mine] = harness.wait_for(
        lambda: [one for one in in_clear() if (one / "lean").exists()], "CRIU's directory is made"
    )
    os.kill(restore.pid, 9)
    restore.communicate()
    harness.wait_for(lambda: not mine.exists(), "the owner removes it")
    jobs.adopt(job.pid)
    harness.wait_for(lambda: not harness.state(job.pid) or harness.state(job.pid) not in "Tt", "no half tree is left")


def test_no_room_in_memory_costs_the_image_and_not_the_job(two_hosts, tmp_path):
    a = two_hosts.a
    identity, recipient = age_key(tmp_path / "identity")
    pid = a.python("counter.py", "/srv/log")
    wait_for_count(a.outside("/srv/log"), 2)
    a.run("mount", "-o", "remount,size=8k", "/dev/shm")
    failed = a.gpuckpt("dump", "--tree", pid, "/srv/image", "--encrypt-to", recipient, *SETTLE)
    assert (failed.status, failed.report["process"]) == (30, "running"), explain(failed)
    assert a.run("ls", "/dev/shm").stdout == ""
    assert not list(a.srv.glob("image*"))
    goes_on(a.outside("/srv/log"), numbers(a.outside("/srv/log"))[-1], more=2)
    a.run("mount", "-o", "remount,size=64m", "/dev/shm")
    dumped = a.gpuckpt("dump", "--tree", pid, "/srv/image", "--encrypt-to", recipient, *SETTLE)
    assert dumped.status == 0, explain(dumped)
    a.run("mount", "-o", "remount,size=8k", "/dev/shm")
    refused = a.gpuckpt("restore", "/srv/image", "--identity", identity, *SETTLE)
    assert (refused.status, refused.report["process"]) == (10, "untouched"), explain(refused)
    assert a.run("ls", "/dev/shm").stdout == ""


def test_extract_gives_a_directory_for_criu(work, jobs):
    identity, recipient = age_key(work / "identity")
    job = jobs.python("counter.py", work / "log", 1)
    wait_for_count(work / "log", 2)
    rounds.dump(jobs, job.pid, work / "image", "--encrypt-to", recipient)
    assert gpuckpt("inspect", work / "image", "--extract", work / "out").status == 20
    looked = gpuckpt("inspect", work / "image", "--extract", work / "out", "--identity", identity)
    assert looked.status == 0, explain(looked)
    assert (work / "out" / "inventory.img").read_bytes()[:4] != b"GPUC"
    assert list((work / "out").glob("pages-*.img"))
    assert "Dumping processes" in (work / "out" / "criu-dump.log").read_text()
    restored = rounds.restore(jobs, work / "image", "--identity", identity, "--plain")
    assert restored.report["data"]["bytes_injected"] == 0
    goes_on(work / "log", numbers(work / "log")[-1], more=2)
    nothing_is_left()

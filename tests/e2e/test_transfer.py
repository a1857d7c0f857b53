"""push and pull as their users call them, over a real sshd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuckpt.stores import farsums
from tests.harness import gpuckpt, start_gpuckpt, wait_for
from tests.small_images import content_of, make_image
from tests.sshd import REMOTE_COMMAND
from tests.transferring import pull, push

MIB = 1 << 20


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to give up")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """`one`; `next`, nine tenths of which `one` holds; `big`, for those that are interrupted."""
    root = tmp_path_factory.mktemp("images")
    make_image(root / "one", 9)
    make_image(root / "next", 1, seed=2, packs=1, base=root / "one")
    make_image(root / "big", 28, seed=3)
    return root


@pytest.fixture
def image(images, tmp_path) -> Path:
    """A copy of `one` of this test's own: notes are written into it."""
    return make_image(tmp_path / "one", 9)


@pytest.fixture
def there(tmp_path) -> Path:
    place = tmp_path / "there"
    place.mkdir(mode=0o700)
    return place


@pytest.mark.parametrize("host", ["far", "bare"])
def test_push_and_pull(sshd, image, there, tmp_path, host):
    pushed = push(sshd, image, there, host=host)
    assert pushed.status == 0, pushed.stderr
    data = pushed.report["data"]
    total = sum(part["size"] for part in json.loads((image / "manifest.json").read_text())["parts"])
    assert (data["bytes_sent"], data["bytes_skipped"]) == (total, 0)
    assert data["location"] == f"{host}:{there}/one"
    assert (
        data["verified"]
        == {
            "far": "BLAKE3 of every byte, where it arrived",
            "bare": "BLAKE3 of every byte, read back over SFTP",
        }[host]
    )
    assert any("secrets" in note for note in data["notes"])
    assert content_of(there / "one") == content_of(image)
    [copy] = json.loads((image / "protected.json").read_text())["copies"]
    assert (copy["host"], copy["path"]) == (host, str(there / "one"))
    assert gpuckpt("inspect", image, "--verify").report["data"]["protected"] == [copy]

    pulled = pull(sshd, there / "one", tmp_path / "back", host=host)
    assert pulled.status == 0, pulled.stderr
    assert pulled.report["data"]["location"] == str(tmp_path / "back" / "one")
    assert content_of(tmp_path / "back" / "one") == content_of(image)
    assert not (there / "one" / "protected.json").exists()


def test_a_host_with_a_shell_and_no_gpuckpt_has_digests_taken_there(sshd, image, there):
    """Also for root, whose confined process has ssh started for it: nothing is read back."""
    done = gpuckpt("push", image, f"far:{there}", "--ssh-config", sshd.config)
    assert done.status == 0, done.stderr
    program = next(program for program in farsums.PROGRAMS if shutil.which(program))
    words = "b3sum there, every byte" if program == farsums.B3SUM else f"SHA-256 of every byte, by {program} there"
    assert done.report["data"]["verified"] == words
    assert any("no gpuckpt that answers" in note for note in done.report["data"]["notes"])
    assert content_of(there / "one") == content_of(image)


def test_a_host_that_is_said_to_offer_sftp_alone_is_asked_for_nothing_else(sshd, image, there, tmp_path):
    """Here there is a shell with programs: none of them is run."""
    alone = ("--ssh-config", sshd.config, "--remote-command", "internal-sftp")
    done = gpuckpt("push", image, f"far:{there}", *alone)
    assert done.status == 0, done.stderr
    assert done.report["data"]["verified"] == "BLAKE3 of every byte, read back over SFTP"
    assert content_of(there / "one") == content_of(image)
    assert gpuckpt("pull", f"bare:{there / 'one'}", tmp_path / "back", *alone).status == 0
    assert content_of(tmp_path / "back" / "one") == content_of(image)
    host = gpuckpt("inspect", "bare:", *alone)
    assert host.status == 10
    assert "no gpuckpt to ask" in host.error["message"]


def test_the_next_image_of_a_series_sends_only_what_is_new(sshd, images, there):
    assert push(sshd, images / "one", there).status == 0
    second = push(sshd, images / "next", there)
    data = second.report["data"]
    assert data["bytes_sent"] <= 0.15 * (data["bytes_sent"] + data["bytes_skipped"])
    again = push(sshd, images / "next", there)
    assert again.status == 0
    assert again.report["data"]["bytes_sent"] == 0
    assert content_of(there / "next") == content_of(images / "next")


@pytest.mark.parametrize("host", ["far", "bare"])
def test_a_line_that_breaks_is_connected_again(sshd, proxy, images, there, host):
    target = sshd.port if host == "far" else sshd.bare_port
    line, config = proxy(there.parent, target, cut_after=12 * MIB)
    config.write_text(config.read_text().replace("Host far", f"Host {host}"))
    pushed = push(sshd, images / "big", there, "--connections", 2, host=host, config=config)
    assert pushed.status == 0, pushed.stderr
    assert line.cuts == 1
    assert content_of(there / "big") == content_of(images / "big")


def test_a_line_that_breaks_while_what_came_is_read_back(sshd, proxy, tmp_path, there):
    """Its first connections carry most of it, and another one reads back what has arrived."""
    image = make_image(tmp_path / "large", 80)
    line, config = proxy(there.parent, sshd.bare_port, cut_after=60 * MIB)
    config.write_text(config.read_text().replace("Host far", "Host bare"))
    pushed = push(sshd, image, there, host="bare", config=config)
    assert pushed.status == 0, pushed.stderr
    assert line.cuts == 1
    assert pushed.report["data"]["verified"] == "BLAKE3 of every byte, read back over SFTP"
    assert content_of(there / "large") == content_of(image)


def test_a_pull_whose_line_breaks(jobs, sshd, proxy, images, tmp_path):
    line, config = proxy(tmp_path)
    running = jobs.own(
        start_gpuckpt(
            *("pull", f"far:{images / 'big'}", tmp_path / "here", "--ssh-config", config, "--bwlimit", "30M"),
            *("--remote-command", REMOTE_COMMAND, "--connections", 2),
        )
    )
    partial = tmp_path / "here" / "big.partial" / "journal"
    wait_for(lambda: partial.exists() and partial.stat().st_size > 36, "pieces arrive")
    line.go_down()
    said = iter(running.stderr)
    assert any("cannot be reached" in event for event in said), "it did not try again, and was not refused"
    line.come_up()
    out, err = running.communicate(timeout=100)
    assert running.returncode == 0, out + err
    assert content_of(tmp_path / "here" / "big") == content_of(images / "big")


def start_push(jobs, sshd, image, there, *more):
    return jobs.own(
        start_gpuckpt(
            *("push", image, f"far:{there}", "--ssh-config", sshd.config, "--remote-command", REMOTE_COMMAND),
            *("--bwlimit", "8M", "--connections", 2, *more),
        )
    )


def arrived(there: Path) -> int:
    """Whole pieces of packs that the far side has noted: the six small parts come first."""
    journal = there / "big.partial" / "journal"
    return max(0, journal.stat().st_size // 36 - 6) if journal.exists() else 0


def serving_pids(there: Path) -> list[int]:
    """Far sides that hold a file below `there` open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
        except OSError:
            continue
        if b"serve" in words and any(link.startswith(str(there)) for link in links):
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("pieces", [0, 3])
def test_killed_and_repeated(jobs, sshd, images, there, pieces):
    running = start_push(jobs, sshd, images / "big", there)
    wait_for(lambda: (there / "big.partial").exists() and arrived(there) >= pieces, "it is under way")
    running.kill()
    running.communicate()
    had = arrived(there)
    wait_for(lambda: not serving_pids(there), "the far side notices")
    again = push(sshd, images / "big", there)
    assert again.status == 0, again.stderr
    assert again.report["data"]["bytes_skipped"] >= max(0, had - 2) * 4 * MIB
    assert content_of(there / "big") == content_of(images / "big")
    assert [path.name for path in there.iterdir()] == ["big"]


def test_a_far_side_that_is_killed_is_connected_again(jobs, sshd, images, there):
    running = start_push(jobs, sshd, images / "big", there)
    wait_for(lambda: arrived(there) >= 2, "pieces arrive")
    for pid in serving_pids(there):
        os.kill(pid, signal.SIGKILL)
    out, err = running.communicate(timeout=100)
    assert running.returncode == 0, out + err
    assert content_of(there / "big") == content_of(images / "big")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_the_same_command_continues(jobs, sshd, images, there, number):
    running = start_push(jobs, sshd, images / "big", there)
    wait_for(lambda: arrived(there) >= 3, "pieces arrive")
    running.send_signal(number)
    out, _ = running.communicate(timeout=100)
    assert running.returncode == 128 + number, out
    assert json.loads(out)["process"] == "untouched"
    wait_for(lambda: not serving_pids(there), "the far side notices")
    assert push(sshd, images / "big", there).report["data"]["bytes_skipped"] > 4 * MIB


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rights_of(pid: int) -> tuple[str, str, int, str]:
    """Real, effective, saved user; groups; capabilities; no_new_privs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    capabilities = int(status["CapPrm"], 16) | int(status["CapEff"], 16) | int(status["CapBnd"], 16)
    return " ".join(status["Uid"].split()[:3]), status["Groups"], capabilities, status["NoNewPrivs"]


NO_RIGHTS = ("65534 65534 65534", "", 0, "1")


@as_root
@pytest.mark.parametrize("verb", ["push", "pull"])
def test_as_root_neither_side_reads_the_network_with_roots_rights(jobs, sshd, images, there, verb):
    reach = ("--ssh-config", sshd.config, "--remote-command", REMOTE_COMMAND, "--bwlimit", "8M", "--connections", 2)
    ends = (images / "big", f"far:{there}") if verb == "push" else (f"far:{images / 'big'}", there)
    running = jobs.own(start_gpuckpt(verb, *ends, *reach))
    wait_for(lambda: arrived(there) >= 2, "pieces arrive")
    confined = [pid for pid in children_of(running.pid) if b"gpuckpt" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    # One that has just been connected gives its rights up at the first question.
    place = there if verb == "push" else images
    wait_for(lambda: {rights_of(pid) for pid in serving_pids(place)} == {NO_RIGHTS}, "the far side has no rights")

    # ssh needs the rights of whoever calls: it is a child of the process that has kept them. One of two connections
    # may have ended: what is left was asked for on the other.
    [reader] = [pid for pid in confined if rights_of(pid) == NO_RIGHTS]
    callers = [pid for pid in children_of(running.pid) if pid != reader]
    assert callers
    assert all(rights_of(pid)[0] == "0 0 0" for pid in callers)

    os.kill(reader, signal.SIGKILL)
    out, _ = running.communicate(timeout=100)
    assert (running.returncode, json.loads(out)["error"]["code"]) == (50, "transfer-failed")
    assert "SIGKILL" in json.loads(out)["error"]["message"]
    assert not [pid for pid in callers if Path(f"/proc/{pid}").exists()], "an ssh is left behind"
    wait_for(lambda: not serving_pids(there) and not serving_pids(images), "the far side notices")
    again = push(sshd, images / "big", there) if verb == "push" else pull(sshd, images / "big", there)
    assert again.status == 0, again.stderr
    assert again.report["data"]["bytes_skipped"] > 0
    assert content_of(there / "big") == content_of(images / "big")


@as_root
def test_a_root_that_cannot_become_nobody_pushes_and_says_so(sshd, image, there):
    """The root of many a container."""
    argv = ["setpriv", "--bounding-set=-setuid", "--inh-caps=-all", sys.executable, "-m", "gpuckpt", "push", image]
    argv += [f"far:{there}", "--ssh-config", sshd.config, "--remote-command", REMOTE_COMMAND, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout
    assert any("may not become nobody" in note for note in json.loads(done.stdout)["data"]["notes"])
    assert content_of(there / "one") == content_of(image)


@as_root
def test_a_push_that_is_killed_leaves_nobody_behind(jobs, sshd, images, there):
    running = start_push(jobs, sshd, images / "big", there)
    wait_for(lambda: arrived(there) >= 2, "pieces arrive")
    others = children_of(running.pid)
    running.kill()
    running.communicate()
    wait_for(lambda: not [pid for pid in others if Path(f"/proc/{pid}").exists()], "all have ended")


def test_the_second_of_two_pushes_is_refused(jobs, sshd, images, there):
    first = start_push(jobs, sshd, images / "big", there, "--bwlimit", "1M")
    wait_for((there / "big.partial" / "token").exists, "it has begun")
    second = push(sshd, images / "big", there)
    assert (second.status, second.error["code"]) == (22, "busy")
    assert first.poll() is None
    first.kill()
    first.communicate()
    wait_for(lambda: not serving_pids(there), "the far side notices")
    assert push(sshd, images / "big", there).status == 0
    assert content_of(there / "big") == content_of(images / "big")


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", place], capture_output=True)
    if done.returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("host", ["far", "bare"])
def test_a_disk_that_is_too_small_is_refused_before_anything_is_sent(sshd, images, small_disk, host):
    (small_disk / "filler").write_bytes(bytes(48 * MIB))
    refused = push(sshd, images / "big", small_disk, host=host)
    assert (refused.status, refused.error["code"]) == (20, "refused")
    assert "MiB are needed" in refused.error["message"]
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("host", ["far", "bare"])
def test_a_disk_that_fills_up_meanwhile(jobs, sshd, images, small_disk, host):
    command = ["--remote-command", REMOTE_COMMAND] if host == "far" else []
    running = jobs.own(
        start_gpuckpt(
            *("push", images / "big", f"{host}:{small_disk}", "--ssh-config", sshd.config, "--bwlimit", "12M", *command)
        )
    )
    wait_for(lambda: any((small_disk / "big.partial").glob("journal*")), "pieces arrive")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(MIB))
        except OSError:
            pass
    out, _ = running.communicate(timeout=100)
    assert running.returncode == 50, out
    assert "full" in json.loads(out)["error"]["message"]
    filler.unlink()
    again = push(sshd, images / "big", small_disk, host=host)
    assert again.status == 0, again.stderr
    assert again.report["data"]["bytes_skipped"] > 0
    assert content_of(small_disk / "big") == content_of(images / "big")


def test_verify_only(sshd, images, there):
    absent = push(sshd, images / "one", there, "--verify-only")
    assert absent.status == 21
    assert push(sshd, images / "one", there).status == 0
    whole = push(sshd, images / "one", there, "--verify-only")
    assert whole.status == 0
    assert (whole.report["data"]["bytes_sent"], bool(whole.report["data"]["verified"])) == (0, True)
    pack = next((there / "one" / "packs").glob("*.zst"))
    pack.write_bytes(bytes(pack.stat().st_size))
    damaged = push(sshd, images / "one", there, "--verify-only")
    assert damaged.status == 60
    assert pack.name in damaged.error["message"]
    assert push(sshd, images / "one", there).status == 60, "a damaged copy was taken for a good one"
    assert pull(sshd, there / "one", there, "--verify-only").status == 60


def test_delete_source_only_after_a_verified_copy(sshd, image, there):
    (there / "one").mkdir()
    assert push(sshd, image, there, "--delete-source").status == 20
    assert image.is_dir()
    (there / "one").rmdir()
    before = content_of(image)
    assert push(sshd, image, there, "--delete-source").status == 0
    assert not image.exists()
    assert not image.with_name("one.partial").exists()
    assert content_of(there / "one") == before


def test_a_damaged_source_is_not_published(sshd, image, there):
    pack = next((image / "packs").glob("*.zst"))
    content = bytearray(pack.read_bytes())
    content[5] ^= 1
    pack.write_bytes(content)
    pushed = push(sshd, image, there)
    assert (pushed.status, pushed.error["code"]) == (60, "image-corrupt")
    assert pack.name in pushed.error["message"]
    assert not (there / "one").exists()


def test_inspect_on_another_host(sshd, images):
    reach = ("--ssh-config", sshd.config, "--remote-command", REMOTE_COMMAND)
    host = gpuckpt("inspect", "far:", *reach)
    assert host.status == 0
    assert host.report["data"]["kind"] == "host"
    assert host.report["data"]["host"]["hostname"] == os.uname().nodename
    image = gpuckpt("inspect", f"far:{images / 'one'}", "--verify", *reach)
    assert image.status == 0
    assert (image.report["data"]["kind"], image.report["data"]["verified"]) == ("image", True)
    bare = gpuckpt("inspect", f"bare:{images / 'one'}", "--ssh-config", sshd.config)
    assert bare.report["data"]["manifest"] == image.report["data"]["manifest"]
    assert gpuckpt("inspect", "bare:", "--ssh-config", sshd.config).status == 10
    assert gpuckpt("inspect", f"far:{images / 'none'}", *reach).status == 21


def test_ipv6_and_a_port(sshd, image, there):
    done = gpuckpt(
        *("push", image, f"ssh://[::1]:{sshd.port}{there}", "--remote-command", REMOTE_COMMAND),
        *("--ssh-config", sshd.config),
    )
    # `Host *` of the configuration gives user and key; address and port are the URL's.
    assert done.status == 0, done.stderr
    assert content_of(there / "one") == content_of(image)


def test_what_a_login_shell_prints_before_is_skipped(sshd, image, there):
    command = f"echo Welcome to far; echo more >&2; {REMOTE_COMMAND}"
    done = gpuckpt("push", image, f"far:{there}", "--ssh-config", sshd.config, "--remote-command", command)
    assert done.status == 0, done.stderr


def test_a_progress_line_needs_no_terminal_and_a_person_gets_one_line(sshd, image, there):
    done = subprocess.run(
        [sys.executable, "-m", "gpuckpt", "push", image, f"far:{there}", "--ssh-config", sshd.config, "--verbose",
         "--remote-command", REMOTE_COMMAND], capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith(f"pushed {image} to far:{there}/one, 9.1 MiB sent")
    assert done.stdout.count("\n") == 1
    assert "secrets" in done.stderr


@pytest.mark.parametrize("megabytes", [6, 80])
def test_an_image_that_is_damaged_here_is_not_blamed_on_a_host_that_takes_digests(sshd, tmp_path, megabytes):
    """Whether or not it is compared while it is sent; nothing is published there."""
    image = make_image(tmp_path / "image", megabytes)
    pack = max((image / "packs").glob("*.zst"))
    with pack.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    answer = gpuckpt("push", image, f"far:{tmp_path}/there", "--ssh-config", sshd.config)
    assert (answer.status, answer.report["process"]) == (60, "untouched"), answer.error
    assert f"packs/{pack.name} of {image} does not fit its manifest: damaged here" in answer.error["message"]
    assert not (tmp_path / "there" / "image").exists()

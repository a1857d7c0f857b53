"""A person at a terminal is asked for a passphrase once; what needs a second answer is done without."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios

from tests.small_images import content_of, make_image
from tests.sshd import REMOTE_COMMAND
from tests.system.test_ssh import encrypted_key


def at_a_terminal(argv, answer: str) -> tuple[int, str, str]:
    """Run a program on a terminal of its own and answer its first question: (status, stdout, what the terminal showed)."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    child = subprocess.Popen(
        argv,
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=slave,
        preexec_fn=take_terminal,  # noqa: PLW1509 - no other thread runs
        text=True,
    )
    os.close(slave)
    shown, answered = "", False
    try:
        while select.select([master], [], [], 100)[0]:
            try:
                shown += os.read(master, 4096).decode(errors="replace")
            except OSError:
                break
            if "Enter passphrase" in shown and not answered:
                answered = True
                os.write(master, f"{answer}\n".encode())
        out, _ = child.communicate(timeout=100)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        os.close(master)
    return child.returncode, out, shown


def test_a_passphrase_is_asked_for_once(sshd, tmp_path):
    _key, config = encrypted_key(sshd, tmp_path)
    image = make_image(tmp_path / "one", 9)
    (tmp_path / "there").mkdir(mode=0o700)
    status, out, shown = at_a_terminal(
        [sys.executable, "-m", "gpuckpt", "push", image, f"far:{tmp_path / 'there'}", "--ssh-config", config,
         "--remote-command", REMOTE_COMMAND, "--connections", "3", "--json"], "open sesame",
    )  # fmt: skip
    assert status == 0, shown
    assert shown.count("Enter passphrase") == 1
    data = json.loads(out)["data"]
    assert data["connections"] == 1
    assert content_of(tmp_path / "there" / "one") == content_of(image)

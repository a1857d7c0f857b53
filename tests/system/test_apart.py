"""The process that keeps root's rights serves the one that gave them up, and sees at once what it waits for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give it up")

PROGRAM = """
import os, socket, sys
from gpuckpt.system import apart, commands
from gpuckpt.system.confinement import Keep
from gpuckpt.system.ssh import Started

apart.LOOK_SECONDS = 3600


class Ssh:
    def start(self, command, *, further, before_exec=None):
        ours, theirs = socket.socketpair()
        stderr, sink = os.pipe()
        script = "sleep 0.5; exit 7" if command == "ends" else "sleep 600"
        child = commands.start(["/bin/sh", "-c", script], stdin=theirs.fileno(), output=theirs.fileno(), errors=sink)
        theirs.close()
        os.close(sink)
        return Started(child, ours, stderr, child.pid)


ended = apart.part(Ssh(), lambda command: True, Keep(), {})
if isinstance(ended, apart.Confined):
    first, second = ended.start("stays", further=False), ended.start("ends", further=True)
    print(second.process.wait(100), flush=True)
    first.process.kill()
    print(first.process.wait(100), flush=True)
    os._exit(3)
names = [f"/proc/self/fd/{number}" for number in range(64)]
print(ended, sum("pidfd" in os.readlink(name) for name in names if os.path.lexists(name)))
"""


def test_the_end_of_an_ssh_is_told_when_it_comes():
    """Not at the next look, which is an hour away here."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["7", "-9", "3 0"], done.stderr

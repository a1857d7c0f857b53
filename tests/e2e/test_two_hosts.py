"""Images on their way between two hosts, each with its own processes, files and network; the link is real."""

from __future__ import annotations

import pytest

from tests.e2e.rounds import SETTLE, explain, goes_on
from tests.harness import numbers, wait_for_count

pytestmark = pytest.mark.criu


def test_a_program_goes_on_on_the_other_host(two_hosts):
    a, b = two_hosts.a, two_hosts.b
    a.worsen_link()
    pid = a.python("counter.py", "/srv/log", 20)
    wait_for_count(a.outside("/srv/log"), 3)
    dumped = a.gpuckpt("dump", "--tree", pid, "/srv/image", *SETTLE)
    assert dumped.status == 0, explain(dumped)
    assert not a.alive(pid)
    pushed = a.gpuckpt("push", "/srv/image", "b:/srv", *two_hosts.reach)
    assert pushed.status == 0, explain(pushed)
    b.outside("/srv/log").write_bytes(a.outside("/srv/log").read_bytes())
    restored = b.gpuckpt("restore", "/srv/image", *SETTLE)
    assert restored.status == 0, explain(restored)
    b.run("kill", "-USR1", pid)
    goes_on(b.outside("/srv/log"), numbers(a.outside("/srv/log"))[-1])
    assert "XSUM" in b.outside("/srv/log").read_text()

"""netfilter against a real kernel: each test runs in a network namespace of its own."""

import errno
import os
import socket
import struct
import subprocess
import sys

import pytest

from gpuckpt.system import commands, netfilter

RUN_ID = "6aef7705-80a4-4394-9c4b-4745751ff58c"
CUT = "CRIU-6aef7705-80a4-4394-9c"
UNSHARE = commands.find_program("unshare")

MAKE_TABLE = """
import sys
sys.path.insert(0, sys.argv[1])
from gpuckpt.system import netfilter as n
def make(family, name):
    batch = n._GENERIC.pack(0, 0, n._NFTABLES)
    body = n._GENERIC.pack(family, 0, 0) + n.text(n._TABLE_NAME, name)
    with n._connect() as link:
        link.send(n._message(n._BATCH_BEGIN, 1, 1, batch) + n._message(n._NEW_TABLE, 0x405, 2, body) + n._message(n._BATCH_END, 1, 3, batch))
        for _ in n._answers(link, acknowledged=2):
            pass
"""


def in_new_namespace(code):
    """Run code, after `make(family, name)` is defined, in a new network namespace; what it printed."""
    if os.geteuid() != 0 or UNSHARE is None:
        pytest.skip("needs root and unshare")
    root = os.path.dirname(os.path.dirname(netfilter.__file__)) + "/.."
    argv = [UNSHARE, "-n", sys.executable, "-c", MAKE_TABLE + code, root]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    if "NetfilterMissing" in done.stderr:
        pytest.skip("this kernel has no nf_tables")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_empty_namespace_has_no_tables():
    assert in_new_namespace(f"print(n.list_tables(), n.delete_criu_tables({RUN_ID!r}))") == ["() ()"]


def test_tables_are_listed_and_deleted_by_family_and_name():
    out = in_new_namespace("""
make(1, "filter")
make(2, "filter")
print([(t.family, t.name) for t in n.list_tables()])
print(n.delete_table(2, "filter"), n.delete_table(2, "filter"), n.delete_table(1, "other"))
print([(t.family, t.name) for t in n.list_tables()])
""")
    assert out == ["[(1, 'filter'), (2, 'filter')]", "True False False", "[(1, 'filter')]"]


def test_many_tables_come_in_several_datagrams():
    out = in_new_namespace("""
for i in range(1500):
    make(1, "t" * 100 + str(i))
print(len({t.name for t in n.list_tables()}))
""")
    assert out == ["1500"]


@pytest.mark.parametrize("name", [CUT, f"CRIU-{RUN_ID}"])
def test_the_lock_of_one_run_is_deleted_and_nothing_else(name):
    others = [
        (2, CUT),
        (1, "CRIU-"),
        (1, "CRIU-6aef7705"),
        (1, CUT + "4"),
        (1, CUT[:-1] + "d"),
        (1, "CRIU-11111111-80a4-4394-9c"),
        (1, "filter"),
    ]
    out = in_new_namespace(f"""
for family, name in {others!r}:
    make(family, name)
make(1, {name!r})
print(n.delete_criu_tables({RUN_ID!r}))
print(sorted((t.family, t.name) for t in n.list_tables()) == sorted({others!r}))
print(n.delete_criu_tables({RUN_ID!r}))
""")
    assert out == [repr((name,)), "True", "()"]


@pytest.mark.parametrize("run_id", ["", "6aef", RUN_ID[:20]])
def test_a_short_id_deletes_nothing(run_id, monkeypatch):
    monkeypatch.setattr(netfilter, "list_tables", lambda: pytest.fail("it looked"))
    assert netfilter.delete_criu_tables(run_id) == ()


class DeafKernel:
    """A netlink socket that answers with prepared datagrams, then not at all."""

    def __init__(self, *datagrams):
        self.datagrams = list(datagrams)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def send(self, _):
        return None

    def recv(self, _):
        if not self.datagrams:
            raise TimeoutError
        return self.datagrams.pop(0)


def refusal(number):
    return struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -number)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_kernel_without_nf_tables_has_no_lock(number, monkeypatch):
    monkeypatch.setattr(netfilter, "_connect", lambda: DeafKernel(refusal(number)))
    assert netfilter.delete_criu_tables(RUN_ID) == ()
    monkeypatch.setattr(netfilter, "_connect", lambda: DeafKernel(refusal(number)))
    with pytest.raises(netfilter.NetfilterMissing):
        netfilter.list_tables()


def test_a_kernel_without_netfilter_netlink_has_no_lock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPROTONOSUPPORT, "x")

    monkeypatch.setattr(socket, "socket", refuse)
    assert netfilter.delete_criu_tables(RUN_ID) == ()


def test_a_refusal_is_an_error_and_silence_too(monkeypatch):
    monkeypatch.setattr(netfilter, "_connect", lambda: DeafKernel(refusal(errno.EPERM)))
    with pytest.raises(PermissionError):
        netfilter.delete_criu_tables(RUN_ID)
    monkeypatch.setattr(netfilter, "_connect", DeafKernel)
    with pytest.raises(TimeoutError):
        netfilter.list_tables()


def test_odd_answers_do_not_hang(monkeypatch):
    done = struct.pack("=IHHII", 16, 3, 0, 1, 0)
    short_attribute = struct.pack("=IHHII", 24, 0xA00, 0, 1, 0) + b"\1\0\0\0" + b"\0\0\0\0"
    monkeypatch.setattr(netfilter, "_connect", lambda: DeafKernel(bytes(40), short_attribute + done))
    assert netfilter.list_tables() == (netfilter.Table(1, ""),)

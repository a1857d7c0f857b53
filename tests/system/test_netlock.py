"""The network lock of a restore against a real kernel: it stops one connection, and nothing beside it."""

import os
import subprocess
import sys

import pytest

import gpuckpt
from gpuckpt.system import commands

UNSHARE = commands.find_program("unshare")

PAIRS = """
import fcntl, socket, struct, sys
sys.path.insert(0, sys.argv[1])
from gpuckpt.system import netfilter, netlock

with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))

def pair(family, address):
    "Both ends of a connection, and its name as its client has it."
    listener = socket.create_server((address, 0), family=family, dualstack_ipv6=False)
    client = socket.create_connection(listener.getsockname()[:2])
    server = listener.accept()[0]
    for end in (client, server):
        end.settimeout(0.5)
    return client, server, netlock.Connection(*client.getsockname()[:2], *client.getpeername()[:2])

def passes(one, other):
    one.sendall(b"x")
    try:
        return other.recv(1) == b"x"
    except TimeoutError:
        return False
"""


def in_new_namespace(code):
    """What this code prints in a network namespace of its own."""
    if os.geteuid() != 0 or UNSHARE is None:
        pytest.skip("needs root and unshare")
    root = os.path.dirname(os.path.dirname(gpuckpt.__file__))
    argv = [UNSHARE, "-n", sys.executable, "-c", PAIRS + code, root]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    if "NetfilterMissing" in done.stderr:
        pytest.skip("this kernel has no nf_tables")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("family", ["INET", "INET6"])
def test_one_connection_stands_still_in_both_directions_and_goes_on_afterwards(family):
    address = {"INET": "127.0.0.1", "INET6": "::1"}[family]
    out = in_new_namespace(f"""
kept, other = (pair(socket.AF_{family}, {address!r}) for _ in range(2))
# The same numbers the other way round are another connection.
netlock.hold_back("gpuckpt-x", [kept[2]])
print(passes(*kept[:2]), passes(*kept[1::-1]), passes(*other[:2]), passes(*other[1::-1]))
print(netfilter.delete_table(netfilter.INET, "gpuckpt-x"))
kept[0].settimeout(10), kept[1].settimeout(10)
print(kept[1].recv(1), kept[0].recv(1), netfilter.list_tables())
""")
    assert out == ["False", "False", "True", "True", "True", "b'x'", "b'x'", "()"]


def test_packets_that_come_to_no_socket_are_not_answered():
    """What it is there for: without it this is a reset."""
    out = in_new_namespace("""
kept, other = pair(socket.AF_INET, "127.0.0.1"), pair(socket.AF_INET, "127.0.0.1")
netlock.hold_back("gpuckpt-x", [kept[2]])
for client, server, _ in (kept, other):
    # A socket in repair mode goes without a word, as at a dump.
    client.setsockopt(socket.IPPROTO_TCP, 19, 1)
    client.close()
for _, server, _ in (kept, other):
    server.sendall(b"x")
    try:
        print(server.recv(1))
    except OSError as error:
        print(type(error).__name__)
""")
    assert out == ["TimeoutError", "ConnectionResetError"]


def test_many_connections_make_one_table_and_a_second_one_of_that_name_is_refused():
    out = in_new_namespace("""
many = [netlock.Connection("10.0.0.1", port, "2.3.4.5", 443) for port in range(1, 1001)]
netlock.hold_back("gpuckpt-x", many)
print(len(netfilter.list_tables()))
try:
    netlock.hold_back("gpuckpt-x", many[:1])
except FileExistsError:
    print("exists")
""")
    assert out == ["1", "exists"]


def test_what_cannot_be_made_whole_is_not_there_at_all():
    out = in_new_namespace("""
wrong = [("here", 1, "10.0.0.1", 2), ("10.0.0.1", 1, "::1", 2), ("10.0.0.1", 1, "10.0.0.2", 1 << 16)]
for one in wrong:
    try:
        netlock.hold_back("gpuckpt-x", [netlock.Connection(*one)])
    except ValueError as error:
        print("ValueError", netfilter.list_tables())
""")
    assert out == ["ValueError", "()"] * 3

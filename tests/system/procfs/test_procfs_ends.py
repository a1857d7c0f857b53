import os
import socket
import tempfile
from pathlib import Path

import pytest
from procfs_programs import wait_until

from gpuckpt.system.procfs import outside, reading, sockettables, unixdiag

DATA = Path(__file__).parents[2] / "data" / "procfs"
ME = f"{os.getpid()} {reading.comm_of(os.getpid())}"


def with_owner(items, owner):
    return next(item for item in items if owner in item.owners)


@pytest.fixture
def short_directory():
    """A unix socket's path holds at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gpuckpt-") as directory:
        yield Path(directory)


def test_pipe_between_two_processes_of_the_tree_is_inside(programs, read):
    child = programs.start(
        """
r, w = os.pipe(); os.dup2(r, 100); os.dup2(w, 101); os.closerange(3, 100)
if os.fork() == 0:
    os.close(100); ready(); forever()
os.close(101); forever()
"""
    )
    wait_until(lambda: not os.path.lexists(f"/proc/{child.pid}/fd/101"), "the parent closed its end")
    tree = read(child)
    (pipe,) = tree.pipes
    assert pipe.inside
    assert pipe.peer == ""
    assert pipe.owners == (f"{child.pid} fd 100", f"{tree.pids[1]} fd 101")
    assert tree.outside_stdio == ()


@pytest.mark.parametrize(("ours", "writable"), [("w", True), ("r", False)])
def test_stdio_on_an_outside_pipe(programs, read, ours, writable):
    reader, writer = os.pipe()
    try:
        end = writer if writable else reader
        options = {"stdout": end} if writable else {"stdin": end}
        fd = 1 if writable else 0
        child = programs.start(f"os.dup2({fd}, 100); ready(); forever()", **options)
        os.close(end)
        tree = read(child)
        (pipe,) = tree.pipes
        assert (pipe.inside, pipe.peer) == (False, ME)
        (stdio,) = tree.outside_stdio
        assert (stdio.fd, stdio.kind, stdio.key, stdio.writable) == (fd, "pipe", f"pipe:[{pipe.inode}]", writable)
        assert stdio.holders == (f"{child.pid} fd {fd}", f"{child.pid} fd 100")
        assert stdio.peer == ME
    finally:
        for fd in (reader, writer):
            if os.path.lexists(f"/proc/self/fd/{fd}") and fd != end:
                os.close(fd)


def test_outside_pipe_that_is_no_stdio(programs, read):
    reader, writer = os.pipe()
    child = programs.start("ready(); forever()", pass_fds=(writer,))
    os.close(writer)
    tree = read(child)
    os.close(reader)
    assert [pipe.inside for pipe in tree.pipes] == [False]
    assert tree.outside_stdio == ()


def test_pipe_whose_other_end_nobody_holds_is_inside(programs, read):
    reader, writer = os.pipe()
    child = programs.start("ready(); forever()", stdin=reader)
    os.close(reader)
    assert [pipe.inside for pipe in read(child).pipes] == [False]
    os.close(writer)
    tree = read(child)
    assert [pipe.inside for pipe in tree.pipes] == [True]
    assert tree.outside_stdio == ()


def test_somebody_who_shares_our_end_is_no_partner(programs, read):
    reader, writer = os.pipe()
    child = programs.start("ready(); forever()", stdin=reader)
    os.close(writer)
    try:
        assert [pipe.inside for pipe in read(child).pipes] == [True]
    finally:
        os.close(reader)


def test_an_end_that_no_proc_shows_is_outside(programs, read):
    """In flight in a socket the reading end is in nobody's table, as if its holder were in another pid namespace."""
    reader, writer = os.pipe()
    left, right = socket.socketpair()
    child = programs.start("ready(); forever()", stdout=writer)
    os.close(writer)
    socket.send_fds(left, [b"x"], [reader])
    os.close(reader)
    try:
        assert outside.other_end_is_open(child.pid, 1) is True
        (pipe,) = read(child).pipes
        assert (pipe.inside, pipe.peer) == (False, "")
        assert [stdio.key for stdio in read(child).outside_stdio] == [f"pipe:[{pipe.inode}]"]
    finally:
        right.close()
        left.close()
    assert outside.other_end_is_open(child.pid, 1) is False
    assert outside.other_end_is_open(child.pid, 99) is None


def test_two_processes_share_stdout_and_stderr(programs, read):
    reader, writer = os.pipe()
    child = programs.start("if os.fork() == 0:\n    ready(); forever()\nforever()", stdout=writer, stderr=writer)
    os.close(writer)
    tree = read(child)
    os.close(reader)
    (stdio,) = tree.outside_stdio
    assert stdio.fd == 1
    assert set(stdio.holders) == {f"{pid} fd {fd}" for pid in tree.pids for fd in (1, 2)}


def test_socketpair_inside_and_outside(programs, read):
    left, right = socket.socketpair()
    child = programs.start(
        """
a, b = socket.socketpair(); os.dup2(a.fileno(), 100); os.dup2(b.fileno(), 101); a.close(); b.close()
ready(); forever()
""",
        stdout=right,
    )
    inode = os.fstat(right.fileno()).st_ino
    right.close()
    tree = read(child)
    inner = [with_owner(tree.sockets, f"{child.pid} fd {fd}") for fd in (100, 101)]
    assert all(end.inside and end.state == "connected" and end.type == "stream" for end in inner)
    assert [end.peer_inode for end in inner] == [inner[1].inode, inner[0].inode]
    outer = with_owner(tree.sockets, f"{child.pid} fd 1")
    assert (outer.inode, outer.inside, outer.peer) == (inode, False, ME)
    assert outer.peer_inode == os.fstat(left.fileno()).st_ino
    (stdio,) = tree.outside_stdio
    assert (stdio.kind, stdio.key, stdio.writable, stdio.peer) == ("socket", f"socket:[{inode}]", True, ME)
    left.close()
    closed = with_owner(read(child).sockets, f"{child.pid} fd 1")
    assert closed.inside, "a closed peer is no other end"


def test_unix_client_of_an_outside_server(programs, read, short_directory):
    path = short_directory / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        child = programs.start(
            f"""
s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); os.dup2(s.fileno(), 100); s.close()
l = socket.socket(socket.AF_UNIX); l.bind(chr(0) + 'gpuckpt-' + str(os.getpid())); l.listen(); os.dup2(l.fileno(), 101); l.close()
ready(); forever()
"""
        )
        waiting = with_owner(read(child).sockets, f"{child.pid} fd 100")
        assert (waiting.inside, waiting.peer) == (False, ME), "connected, not yet accepted"
        connection = server.accept()[0]
        tree = read(child)
        client = with_owner(tree.sockets, f"{child.pid} fd 100")
        assert (client.inside, client.peer, client.remote, client.state) == (False, ME, str(path), "connected")
        assert client.peer_inode == os.fstat(connection.fileno()).st_ino
        listening = with_owner(tree.sockets, f"{child.pid} fd 101")
        assert (listening.state, listening.inside) == ("listen", True)
        assert listening.local == f"@gpuckpt-{child.pid}"
        connection.close()


def test_unix_connection_inside_that_nobody_accepted(programs, read, short_directory):
    path = short_directory / "s"
    child = programs.start(
        f"""
l = socket.socket(socket.AF_UNIX); l.bind({str(path)!r}); l.listen()
s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})
ready(); forever()
"""
    )
    assert [end.inside for end in read(child).sockets] == [True, True]


def test_dgram_to_an_outside_socket(programs, read, short_directory):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(short_directory / "log"))
        child = programs.start(
            f"s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect({str(short_directory / 'log')!r}); "
            "t = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); os.dup2(t.fileno(), 100); t.close(); ready(); forever()"
        )
        tree = read(child)
        alone = with_owner(tree.sockets, f"{child.pid} fd 100")
        (talks,) = [end for end in tree.sockets if end != alone]
        assert (talks.type, talks.state, talks.inside, talks.peer) == ("dgram", "connected", False, ME)
        assert (alone.state, alone.inside) == ("unconnected", True)


INET = """
l = socket.create_server(('127.0.0.1', 0)); os.dup2(l.fileno(), 100)
c = socket.create_connection(l.getsockname()); os.dup2(c.fileno(), 101)
a = l.accept()[0]; os.dup2(a.fileno(), 102)
q = socket.create_connection(l.getsockname()); os.dup2(q.fileno(), 103)
l6 = socket.socket(socket.AF_INET6); l6.bind(('::', 0)); l6.listen()
m = socket.create_connection(('127.0.0.1', l6.getsockname()[1])); os.dup2(m.fileno(), 104)
n = l6.accept()[0]; os.dup2(n.fileno(), 105)
u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0)); os.dup2(u.fileno(), 106)
os.dup2(socket.socket().detach(), 107)
os.dup2(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).detach(), 108)
os.dup2(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).detach(), 109)
for s in (l, c, a, q, l6, m, n, u): s.close()
os.closerange(3, 100)
"""


def check_inet(tree, pid):
    found = {fd: with_owner(tree.sockets, f"{pid} fd {fd}") for fd in range(100, 110)}
    assert {fd: (end.family, end.type, end.state) for fd, end in found.items()} == {
        100: ("inet", "stream", "listen"),
        101: ("inet", "stream", "established"),
        102: ("inet", "stream", "established"),
        103: ("inet", "stream", "established"),
        104: ("inet", "stream", "established"),
        105: ("inet6", "stream", "established"),
        106: ("inet", "dgram", "unconnected"),
        107: ("inet", "stream", "unconnected"),
        108: ("netlink", "raw", "unconnected"),
        109: ("packet", "raw", "unconnected"),
    }
    assert all(end.inside for end in found.values()), [end for end in found.values() if not end.inside]
    assert found[101].peer_inode == found[102].inode
    assert found[104].peer_inode == found[105].inode, "an IPv4 connection to an IPv6 socket"
    assert found[101].remote == found[102].local == found[100].local
    assert found[105].local.startswith("[::ffff:127.0.0.1]:")


def test_connections_inside(programs, read):
    child = programs.start(INET + "ready(); forever()")
    check_inet(read(child), child.pid)


def test_connections_in_another_network_namespace(programs, read):
    """The tables and the diagnosis are those of the tree's namespace, not ours."""
    child = programs.start(
        """
assert ctypes.CDLL(None).unshare(0x40000000) == 0
probe = socket.socket(); fcntl.ioctl(probe, 0x8914, struct.pack('16sh14x', b'lo', 0x1)); probe.close()
"""
        + INET
        + "a, b = socket.socketpair(); os.dup2(a.fileno(), 110); os.dup2(b.fileno(), 111); a.close(); b.close(); ready(); forever()"
    )
    before = os.readlink("/proc/self/ns/net")
    tree = read(child)
    check_inet(tree, child.pid)
    pair = [with_owner(tree.sockets, f"{child.pid} fd {fd}") for fd in (110, 111)]
    assert [end.peer_inode for end in pair] == [pair[1].inode, pair[0].inode]
    assert all(end.inside for end in pair)
    assert os.readlink("/proc/self/ns/net") == before


def test_sockets_of_another_namespace_than_their_holder_s(programs, read):
    child = programs.start(
        """
a, b = socket.socketpair(); os.dup2(a.fileno(), 100); os.dup2(b.fileno(), 101); a.close(); b.close()
if os.fork() == 0:
    assert ctypes.CDLL(None).unshare(0x40000000) == 0
    ready(); forever()
os.close(100); os.close(101)
keep = socket.socket(); ready('closed'); forever()
""",
    )
    wait_until((programs.directory / "closed").exists, "the parent closed its ends")
    tree = read(child)
    (member,) = tree.pids[1:]
    pair = [with_owner(tree.sockets, f"{member} fd {fd}") for fd in (100, 101)]
    assert [(end.family, end.inside, end.owners) for end in pair] == [
        ("unix", True, (f"{member} fd 100",)),
        ("unix", True, (f"{member} fd 101",)),
    ]


def test_a_socket_of_a_namespace_that_nobody_here_is_in_is_not_called_inside(programs, read):
    child = programs.start(
        "a, b = socket.socketpair(); assert ctypes.CDLL(None).unshare(0x40000000) == 0; ready(); forever()"
    )
    assert [(end.state, end.inside) for end in read(child).sockets] == [("unknown", False)] * 2


def test_connections_that_leave_the_tree(programs, read):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as datagram:
        datagram.bind(("127.0.0.1", 0))
        child = programs.start(
            f"""
c = socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); os.dup2(c.fileno(), 0); c.close()
u = socket.socket(type=socket.SOCK_DGRAM); u.connect(('127.0.0.1', {datagram.getsockname()[1]})); os.dup2(u.fileno(), 100); u.close()
ready(); forever()
"""
        )
        assert not with_owner(read(child).sockets, f"{child.pid} fd 0").inside, "not yet accepted by us"
        connection = server.accept()[0]
        tree = read(child)
        stream = with_owner(tree.sockets, f"{child.pid} fd 0")
        assert (stream.inside, stream.peer, stream.state) == (False, ME, "established")
        assert stream.remote == f"127.0.0.1:{server.getsockname()[1]}"
        assert stream.peer_inode == os.fstat(connection.fileno()).st_ino
        assert not with_owner(tree.sockets, f"{child.pid} fd 100").inside
        assert tree.outside_stdio == (), "TCP at descriptor 0 is a connection, no stdio of CRIU's"
        connection.close()


def test_vsock(programs, read):
    child = programs.start(
        """
try: s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); ready('vsock')
except OSError: pass
ready(); forever()
"""
    )
    if not (programs.directory / "vsock").exists():
        pytest.skip("this kernel has no vsock")
    assert [end.family for end in read(child).sockets] == ["vsock"]


def test_terminal_with_an_outside_master(programs, read):
    master, slave = os.openpty()
    child = programs.start(
        "fcntl.ioctl(0, 0x540E, 0); ready(); forever()", stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    status = os.fstat(slave)
    os.close(slave)
    tree = read(child)
    (stdio,) = tree.outside_stdio
    assert (stdio.fd, stdio.kind, stdio.writable, stdio.peer) == (0, "tty", True, ME)
    assert stdio.key == f"tty[{status.st_rdev:x}:{status.st_dev:x}]"
    assert stdio.holders == tuple(f"{child.pid} fd {fd}" for fd in range(3))
    assert tree.surroundings.has_terminal
    assert tree.processes[0].foreground
    assert tree.processes[0].controlling_tty != 0
    os.close(master)


def test_terminal_is_known_without_an_open_descriptor(programs, read):
    master, slave = os.openpty()
    child = programs.start(
        "fcntl.ioctl(0, 0x540E, 0); null = os.open('/dev/null', os.O_RDWR); os.dup2(null, 0); ready(); forever()",
        stdin=slave,
    )
    os.close(slave)
    tree = read(child)
    os.close(master)
    assert tree.outside_stdio == ()
    assert tree.surroundings.has_terminal


def test_terminal_with_its_master_in_the_tree(programs, read):
    child = programs.start(
        """
master, slave = os.openpty(); os.dup2(master, 100); os.dup2(slave, 101)
if os.fork() == 0:
    os.setsid(); fcntl.ioctl(101, 0x540E, 0)
    for fd in range(3): os.dup2(101, fd)
    os.closerange(3, 200); ready(); forever()
forever()
"""
    )
    tree = read(child)
    assert tree.outside_stdio == ()
    assert tree.processes[1].controlling_tty != 0
    assert not tree.surroundings.has_terminal


def test_terminal_whose_master_was_closed(programs, read):
    master, slave = os.openpty()
    child = programs.start("ready(); forever()", stdin=slave)
    os.close(slave)
    assert len(read(child).outside_stdio) == 1
    os.close(master)
    assert read(child).outside_stdio == ()


def test_session_of_the_root(programs, read):
    assert read(programs.start("ready(); forever()")).surroundings.session_leader_inside
    follower = programs.start("ready(); forever()", start_new_session=False)
    assert not read(follower).surroundings.session_leader_inside


def test_unix_diagnosis_answers_for_many_sockets():
    pairs = [socket.socketpair() for _ in range(400)]
    try:
        found = unixdiag.unix_peers(None)
        for left, right in pairs:
            assert found.peers[os.fstat(left.fileno()).st_ino] == os.fstat(right.fileno()).st_ino
    finally:
        for pair in pairs:
            for end in pair:
                end.close()
    assert unixdiag.unix_peers("/proc/self/ns/no-such") is None


def test_recorded_tables():
    (listen, client, waiting, closed) = sockettables.parse_inet("tcp", (DATA / "tcp-6.18").read_text())
    assert (listen.inode, listen.state, listen.local, listen.remote, listen.pair) == (
        1076,
        "listen",
        "0.0.0.0:2024",
        "",
        None,
    )
    assert (client.state, client.local, client.remote) == ("established", "192.0.2.2:33896", "203.0.113.80:80")
    assert (waiting.inode, waiting.state) == (0, "time-wait")
    assert closed.state == "close-wait"
    (six,) = sockettables.parse_inet("tcp6", (DATA / "tcp6-6.18").read_text())
    assert (six.local, six.remote) == ("[::ffff:127.0.0.1]:8080", "[2001:db8::1]:443")
    assert six.pair[1] == "0100007F:1F90"
    unix = list(sockettables.parse_unix((DATA / "unix-6.18").read_text()))
    assert [(row.inode, row.type, row.state, row.local) for row in unix] == [
        (1073, "stream", "connected", ""),
        (1200, "stream", "listen", "/run/dbus/system bus socket"),
        (1201, "dgram", "unconnected", "@/org/kernel"),
        (1202, "seqpacket", "connected", ""),
    ]


def test_a_shell_pipeline_as_one_tree_is_inside(programs, read):
    child = programs.start(
        "import subprocess\n"
        "p = subprocess.Popen(['/bin/sh', '-c', 'sleep 1000 | cat'], stdin=subprocess.DEVNULL)\nready(); forever()"
    )
    wait_until(lambda: len(read(child).processes) == 4 and len(read(child).pipes) == 1, "the pipeline runs")
    tree = read(child)
    assert [pipe.inside for pipe in tree.pipes] == [True]
    assert tree.outside_stdio == ()


def test_scan_skips_what_was_not_asked_for(programs):
    child = programs.start("r, w = os.pipe(); os.dup2(r, 100); ready(); forever()")
    link = os.readlink(f"/proc/{child.pid}/fd/100")
    found = outside.find_outside({os.getpid()}, {link}, masters=False)
    assert set(found.by_link) == {link}
    assert {holder.pid for holder in found.by_link[link]} == {child.pid}
    reads = [holder for holder in found.by_link[link] if holder.fd == 100]
    assert [(holder.readable, holder.writable) for holder in reads] == [(True, False)]
    assert outside.find_outside({child.pid}, {link}, masters=False).by_link == {}

"""criuformat and wire against recorded files, forged files, and dumps made here by the real CRIU."""

import os
import re
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import real_criu
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuckpt.images import criuformat, ports, wire
from gpuckpt.model.errors import ImageCorrupt
from gpuckpt.system import netfilter

DATA = Path(__file__).parents[1] / "data" / "criu-4.2.1"
RECORDED = sorted(path for path in DATA.glob("*/*.img"))
FILES_MAGIC = struct.pack("<II", 0x54564319, 0x56303138)


# ---- the wire format ----------------------------------------------------------------------------

varints = st.integers(0, (1 << 64) - 1)
fields = st.one_of(
    st.builds(wire.integer, st.integers(1, (1 << 29) - 1), varints),
    st.builds(wire.chunk, st.integers(1, 400), st.binary(max_size=300)),
)


@given(st.lists(fields, max_size=30))
def test_what_is_built_is_read_back(made):
    assert wire.decode(wire.encode(made)) == tuple(made)


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_are_refused_or_come_back_identical(body):
    try:
        decoded = wire.decode(body)
    except wire.Malformed:
        return
    assert wire.encode(decoded) == body


@given(st.binary(max_size=400))
def test_any_file_is_refused_or_comes_back_identical(tail):
    raw = FILES_MAGIC + tail
    try:
        image = wire.split(raw, (0x54564319, 0x56303138), "files.img")
    except ImageCorrupt as error:
        assert "files.img" in error.message
        return
    assert wire.join(image) == raw


def test_unusual_encodings_survive():
    body = b"\x08\x81\x00" + b"\x15\x01\x02\x03\x04" + b"\x19" + bytes(8) + b"\x9a\x06\x02hi"
    decoded = wire.decode(body)
    assert [(field.number, field.kind) for field in decoded] == [(1, 0), (2, 5), (3, 1), (99, 2)]
    assert decoded[0].value == 1
    assert wire.encode(decoded) == body


def test_negative_numbers_take_ten_bytes_as_in_protobuf():
    assert wire.integer(3, -1).raw == b"\x18" + b"\xff" * 9 + b"\x01"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"\x08", "no end"),
        (b"\x08" + b"\x80" * 11 + b"\x00", "no end"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x0a\x05abcd", "longer than"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "longer than"),
        (b"\x0d\x00\x00", "longer than"),
        (b"\x00\x00", "number 0"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x0f", "wire type 7"),
    ],
)
def test_damage_is_named(body, what):
    with pytest.raises(wire.Malformed, match=what):
        wire.decode(body)


def test_fields_and_messages_are_bounded(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FIELDS", 10)
    monkeypatch.setattr(wire, "MAX_MESSAGES", 10)
    with pytest.raises(wire.Malformed, match="too many fields"):
        wire.decode(b"\x08\x01" * 11)
    with pytest.raises(wire.Malformed, match="too many numbers"):
        wire.numbers_of((wire.chunk(5, b"\x01" * 11),), 5)
    with pytest.raises(ImageCorrupt, match="more than 10 messages"):
        wire.split(FILES_MAGIC + bytes(4) * 11, (0x54564319, 0x56303138), "files.img")


def test_the_last_number_counts_and_lists_may_be_packed():
    made = (wire.integer(1, 5), wire.integer(1, 6), wire.chunk(2, b"\x03\xac\x02"), wire.integer(2, 9))
    assert wire.number_of(made, 1) == 6
    assert wire.number_of(made, 7, 42) == 42
    assert wire.numbers_of(made, 2) == (3, 300, 9)
    assert wire.chunk_of(made, 1) is None
    assert wire.text_of((wire.chunk(6, b"/a\xff"),), 6) == "/a\udcff"


# ---- files on disk ------------------------------------------------------------------------------


def test_what_cannot_be_an_image_file_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/hostname")
    (tmp_path / "directory").mkdir()
    for name in ("missing", "fifo", "directory"):
        with pytest.raises(ImageCorrupt, match=name):
            wire.read_image(tmp_path / name)
    with pytest.raises((ImageCorrupt, OSError)):
        wire.read_image(tmp_path / "link")
    monkeypatch.setattr(wire, "MAX_FILE_BYTES", 10)
    (tmp_path / "big").write_bytes(bytes(11))
    with pytest.raises(ImageCorrupt, match="larger"):
        wire.read_image(tmp_path / "big")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recorded_files_come_back_identical(path):
    raw = path.read_bytes()
    magics = struct.unpack_from("<I" if path.name == "inventory.img" else "<II", raw)
    image = wire.split(raw, magics, path.name)
    assert image.messages
    again = tuple(wire.encode(wire.decode(message)) for message in image.messages)
    assert wire.join(wire.ImageFile(image.magic, again)) == raw


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_cut_of_a_recorded_file_is_refused_or_read(path, tmp_path):
    """Cut anywhere: a clean refusal or, at a border between two messages, a shorter list."""
    readers = {
        "inventory.img": criuformat.read_inventory,
        "pstree.img": criuformat.read_process_list,
        "files.img": lambda p: criuformat.outside_sockets(p.read_bytes(), p.name),
        "remap-fpath.img": lambda p: criuformat.link_remaps(p.parent),
    }
    raw = path.read_bytes()
    (tmp_path / "files.img").write_bytes((path.parent / "files.img").read_bytes())
    cut = tmp_path / path.name
    refused = 0
    for size in range(0, len(raw), max(1, len(raw) // 200)):
        cut.write_bytes(raw[:size])
        try:
            readers[path.name](cut)
        except ImageCorrupt as error:
            assert path.name in error.message
            refused += 1
    assert refused > 1


def test_recorded_inventory():
    inventory = criuformat.read_inventory(DATA / "tcp" / "inventory.img")
    assert inventory.image_version == 2
    assert inventory.has_root_ids
    assert inventory.network_lock == "nftables"
    assert not inventory.tcp_close
    assert inventory.lsm == ""
    assert inventory.plugins == ()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", inventory.run_id)
    closing = criuformat.read_inventory(DATA / "tcp-close" / "inventory.img")
    assert (closing.tcp_close, closing.network_lock) == (True, "iptables")


def test_inventory_with_plugins_and_unknown_values(tmp_path):
    plugins = wire.encode([wire.chunk(12, b"cuda_plugin"), wire.chunk(12, b"amdgpu_plugin")])
    made = [wire.integer(1, 2), wire.integer(6, 9), wire.integer(11, 77), wire.chunk(12, plugins)]
    body = wire.encode(made)
    path = tmp_path / "inventory.img"
    path.write_bytes(struct.pack("<II", 0x58313116, len(body)) + body)
    inventory = criuformat.read_inventory(path)
    assert inventory.plugins == ("cuda_plugin", "amdgpu_plugin")
    assert (inventory.lsm, inventory.network_lock, inventory.run_id) == ("9", "unknown", "")
    path.write_bytes(struct.pack("<I", 0x58313116) + (struct.pack("<I", len(body)) + body) * 2)
    with pytest.raises(ImageCorrupt, match=r"inventory\.img: 2 entries"):
        criuformat.read_inventory(path)


def test_recorded_processes():
    root, child = criuformat.read_process_list(DATA / "tcp" / "pstree.img")
    assert root.ppid == 0
    assert root.pid == root.pgid == root.sid == child.ppid == child.sid
    assert len(root.threads) == 2
    assert root.threads[0] == root.pid
    assert child.threads == (child.pid,)


def test_recorded_regular_files():
    raw = (DATA / "sem" / "files.img").read_bytes()
    files = {file.name: file for file in criuformat.list_regular_files(raw)}
    assert files["/dev/null"].size is None
    report = next(file for name, file in files.items() if name.endswith("/report"))
    assert report.flags & os.O_APPEND
    assert report.position > 0
    assert report.mode == 0o100644
    assert files["/"].mode & 0o170000 == 0o040000
    program = next(file for name, file in files.items() if "/bin/python3" in name)
    assert program.size > 1000
    assert program.position == 0


def test_recorded_link_remaps():
    (remap,) = criuformat.link_remaps(DATA / "sem")
    assert re.fullmatch(r"/dev/shm/link_remap\.\d+", remap.path)
    assert re.fullmatch(r"/dev/shm/sem\.\w{6}", remap.original)
    assert criuformat.link_remaps(DATA / "tcp") == ()


def remap_image(directory, remap_name, original_name, kind=0):
    def regular(identity, name):
        entry = wire.encode([wire.integer(1, identity), wire.chunk(6, name.encode())])
        return wire.encode([wire.integer(1, 1), wire.integer(2, identity), wire.chunk(3, entry)])

    files = wire.ImageFile(FILES_MAGIC, (regular(1, original_name), regular(2, remap_name)))
    (directory / "files.img").write_bytes(wire.join(files))
    entry = wire.encode([wire.integer(1, 1), wire.integer(2, 2), wire.integer(3, kind)])
    remaps = wire.ImageFile(struct.pack("<II", 0x54564319, 0x59133954), (entry, entry))
    (directory / "remap-fpath.img").write_bytes(wire.join(remaps))
    return criuformat.link_remaps(directory)


def test_remaps_of_one_file_are_given_once_and_ghosts_not(tmp_path):
    assert remap_image(tmp_path, "/dev/shm/link_remap.2", "/dev/shm/x") == (
        criuformat.LinkRemap("/dev/shm/link_remap.2", "/dev/shm/x"),
    )
    assert remap_image(tmp_path, "/dev/shm/ghost", "/dev/shm/x", kind=1) == ()
    (tmp_path / "files.img").unlink()
    assert criuformat.link_remaps(tmp_path) == ()


@pytest.mark.parametrize(
    ("remap", "original"),
    [
        ("/etc/passwd", "/x"),
        ("link_remap.1", "/x"),
        ("/a/../link_remap.1", "/x"),
        ("/a/link_remap.1\0", "/x"),
        ("/a/link_remap.1", "/x/../y"),
        ("/a/link_remap.1/", "x"),
        ("/a/link_remap.1x", "/x"),
        ("/a/my-link_remap.1", "/x"),
    ],
)
def test_forged_remaps_are_refused(tmp_path, remap, original):
    with pytest.raises(ImageCorrupt, match="remap-fpath"):
        remap_image(tmp_path, remap, original)


def test_a_remap_of_a_file_that_is_not_there_is_refused(tmp_path):
    remap_image(tmp_path, "/dev/shm/link_remap.2", "/dev/shm/x")
    (tmp_path / "files.img").write_bytes(FILES_MAGIC)
    with pytest.raises(ImageCorrupt, match="lacks"):
        criuformat.link_remaps(tmp_path)


def test_a_remap_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "remap-fpath.img").symlink_to(tmp_path / "nowhere")
    with pytest.raises((ImageCorrupt, OSError)):
        criuformat.link_remaps(tmp_path)


# ---- sockets ------------------------------------------------------------------------------------


def inet(inode, state, source, target, *, family=2, protocol=6):
    words = [
        struct.unpack(f"<{4 if f == 10 else 1}I", socket.inet_pton(f, a[0]))
        for f, a in ((family, source), (family, target))
    ]
    numbers = [inode, inode, family, 1, protocol, state, source[1], target[1], 2, 5]
    made = [wire.integer(number, value) for number, value in enumerate(numbers, 1)]
    made += [wire.integer(11, word) for word in words[0]] + [wire.integer(12, word) for word in words[1]]
    made += [wire.chunk(13, b"\x08\x00"), wire.chunk(14, b""), wire.integer(999, 7)]
    return wire.encode([wire.integer(1, 4), wire.integer(2, inode), wire.chunk(4, wire.encode(made))])


def files_with(*messages):
    return wire.join(wire.ImageFile(FILES_MAGIC, messages))


def test_recorded_sockets():
    raw = (DATA / "tcp" / "files.img").read_bytes()
    sockets = criuformat.list_inet_sockets(raw)
    assert len(sockets) == 4
    assert {entry.source for entry in sockets} == {"127.0.0.1"}
    assert sorted(entry.state for entry in sockets) == [1, 1, 1, 10]
    (outside,) = criuformat.outside_sockets(raw)
    assert outside.connected
    edited = criuformat.close_sockets(raw, [outside.inode])
    assert criuformat.outside_sockets(edited) == ()
    before = wire.split(raw, (0x54564319, 0x56303138), "a").messages
    after = wire.split(edited, (0x54564319, 0x56303138), "a").messages
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    closed = next(entry for entry in criuformat.list_inet_sockets(edited) if entry.inode == outside.inode)
    assert (closed.state, closed.source_port, closed.target_port) == (7, 0, 0)
    assert (closed.source, closed.target, closed.id) == (outside.source, outside.target, outside.id)


def test_inner_pairs_are_recognised_across_families():
    raw = files_with(
        inet(1, 1, ("127.0.0.1", 40000), ("127.0.0.1", 80)),
        inet(2, 1, ("::ffff:127.0.0.1", 80), ("::ffff:127.0.0.1", 40000), family=10),
        inet(3, 8, ("fe80::1", 5), ("fe80::2", 6), family=10),
        inet(4, 10, ("0.0.0.0", 80), ("0.0.0.0", 0)),
        inet(5, 1, ("10.0.0.1", 53), ("10.0.0.2", 53), protocol=17),
        inet(6, 7, ("0.0.0.0", 0), ("0.0.0.0", 0)),
    )
    assert [entry.inode for entry in criuformat.outside_sockets(raw)] == [3]


def test_only_connections_are_closed_and_nothing_else_changes():
    raw = files_with(
        inet(1, 1, ("10.0.0.1", 40000), ("10.0.0.2", 80)),
        inet(4, 10, ("0.0.0.0", 80), ("0.0.0.0", 0)),
        inet(5, 1, ("10.0.0.1", 53), ("10.0.0.2", 53), protocol=17),
    )
    assert criuformat.close_sockets(raw, [4, 5, 77]) == raw
    assert criuformat.close_sockets(raw, []) == raw
    edited = criuformat.close_sockets(raw, {1, 4, 5})
    expected = files_with(
        inet(1, 7, ("10.0.0.1", 0), ("10.0.0.2", 0)),
        inet(4, 10, ("0.0.0.0", 80), ("0.0.0.0", 0)),
        inet(5, 1, ("10.0.0.1", 53), ("10.0.0.2", 53), protocol=17),
    )
    assert edited == expected


def test_ports_move_with_both_ends_of_inner_connections():
    raw = files_with(
        inet(1, 10, ("0.0.0.0", 80), ("0.0.0.0", 0)),
        inet(2, 1, ("127.0.0.1", 40000), ("127.0.0.1", 80)),
        inet(3, 1, ("127.0.0.1", 80), ("127.0.0.1", 40000)),
        inet(4, 1, ("10.0.0.1", 80), ("10.0.0.2", 5000)),
        inet(5, 1, ("10.0.0.1", 5001), ("10.0.0.2", 80)),
        inet(6, 7, ("0.0.0.0", 80), ("0.0.0.0", 0), protocol=17),
        inet(7, 1, ("127.0.0.1", 53), ("127.0.0.1", 80), protocol=17),
        inet(8, 1, ("10.0.0.1", 53), ("10.0.0.2", 80), protocol=17),
        inet(9, 10, ("0.0.0.0", 81), ("0.0.0.0", 0)),
    )
    expected = files_with(
        inet(1, 10, ("0.0.0.0", 90), ("0.0.0.0", 0)),
        inet(2, 1, ("127.0.0.1", 40000), ("127.0.0.1", 90)),
        inet(3, 1, ("127.0.0.1", 90), ("127.0.0.1", 40000)),
        # Connections to outside stay: the other end knows the port, or has it.
        inet(4, 1, ("10.0.0.1", 80), ("10.0.0.2", 5000)),
        inet(5, 1, ("10.0.0.1", 5001), ("10.0.0.2", 80)),
        inet(6, 7, ("0.0.0.0", 90), ("0.0.0.0", 0), protocol=17),
        inet(7, 1, ("127.0.0.1", 53), ("127.0.0.1", 90), protocol=17),
        inet(8, 1, ("10.0.0.1", 53), ("10.0.0.2", 80), protocol=17),
        inet(9, 10, ("0.0.0.0", 81), ("0.0.0.0", 0)),
    )
    assert ports.move(raw, {80: 90, 7: 8}) == expected
    assert ports.move(raw, {7: 8}) == raw
    assert ports.move(raw, {}) == raw


def test_an_address_of_the_wrong_length_is_no_address():
    entry = wire.encode([wire.integer(3, 2), wire.integer(5, 6), wire.integer(6, 1), wire.integer(8, 9)])
    raw = files_with(wire.encode([wire.integer(1, 4), wire.chunk(4, entry)]))
    (found,) = criuformat.list_inet_sockets(raw)
    assert (found.source, found.target) == ("", "")
    assert criuformat.outside_sockets(raw) == (found,)


# ---- the real thing -----------------------------------------------------------------------------

TWO_CONNECTIONS = """
import os, socket, sys, threading, time
report, port = open(sys.argv[1], "a", buffering=1), int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", 0))
child = os.fork()
if child == 0:
    inner = socket.create_connection(listener.getsockname())
    listener.close()
    while heard := inner.recv(100):
        inner.sendall(heard)
    os._exit(0)
threading.Thread(target=threading.Event().wait, daemon=True).start()
inner = listener.accept()[0]
outside = socket.create_connection(("127.0.0.1", port))
number = 0
while True:
    number += 1
    inner.sendall(b"%d" % number)
    echo = int(inner.recv(100))
    try:
        outside.sendall(b"x")
        said = "sent"
    except OSError as error:
        said = type(error).__name__
    print("echo", echo, "outside", said, file=report)
    time.sleep(0.05)
"""

SEMAPHORE = """
import ctypes, os, sys, time
report = open(sys.argv[1], "a", buffering=1)
libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p
semaphore = ctypes.c_void_p(libc.sem_open(sys.argv[2].encode(), os.O_CREAT, 0o600, 1))
number = 0
while True:
    libc.sem_wait(semaphore)
    number += 1
    print("took", number, file=report)
    libc.sem_post(semaphore)
    time.sleep(0.05)
"""


@pytest.fixture
def lab(tmp_path):
    real_criu.need_criu()
    made = real_criu.Lab(tmp_path)
    yield made
    made.close()


@pytest.fixture
def listener():
    """A process outside the tree: this one, which reads what it is sent and forgets it."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        try:
            connection, _ = server.accept()
            with connection:
                while connection.recv(1000):
                    pass
        except OSError:
            return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.close()


@pytest.mark.criu
def test_only_the_outside_connection_is_closed_by_the_edit(lab, listener):
    pid = lab.start(TWO_CONNECTIONS, str(listener))
    real_criu.wait_for(lambda: len(lab.lines()) > 5)
    log = lab.dump("--tcp-established", "--network-lock", "nftables")
    run_id = re.search(r"CRIU run id = (\S+)", log).group(1)
    try:
        inventory = criuformat.read_inventory(lab.images / "inventory.img")
        assert (inventory.run_id, inventory.network_lock) == (run_id, "nftables")
        processes = criuformat.read_process_list(lab.images / "pstree.img")
        assert processes[0].pid == pid
        assert [len(process.threads) for process in processes] == [2, 1]
        path = lab.images / "files.img"
        (outside,) = criuformat.outside_sockets(path.read_bytes(), str(path))
        assert outside.target_port == listener
        path.write_bytes(criuformat.close_sockets(path.read_bytes(), [outside.inode]))
    finally:
        # The source's lock outlives a dump that ends the tree; here it would cut the inner pair as well.
        assert len(netfilter.delete_criu_tables(run_id)) == 1
    count = len(lab.lines())
    lab.restore("--tcp-established")
    real_criu.wait_for(lambda: len(lab.lines()) > count + 5)
    echoes = [line.split() for line in lab.lines()]
    assert [int(words[1]) for words in echoes] == list(range(1, len(echoes) + 1))
    assert {words[3] for words in echoes[:count]} == {"sent"}
    assert {words[3] for words in echoes[count + 1 :]} <= {"BrokenPipeError", "ConnectionResetError"}


@pytest.mark.criu
def test_a_semaphore_comes_back_when_its_link_remap_file_is_there(lab):
    name = f"/gpuckpt-test-{os.getpid()}"
    pid, remap = lab.start(SEMAPHORE, name), None
    try:
        real_criu.wait_for(lambda: len(lab.lines()) > 3)
        lab.dump("--link-remap")
        (remap,) = criuformat.link_remaps(lab.images)
        assert os.stat(remap.path).st_size == 32
        files = criuformat.list_regular_files((lab.images / "files.img").read_bytes())
        assert any(file.name == str(lab.report) and file.flags & os.O_APPEND for file in files)
        (process,) = criuformat.read_process_list(lab.images / "pstree.img")
        assert (process.pid, process.ppid, process.threads) == (pid, 0, (pid,))
        count = len(lab.lines())
        time.sleep(0.1)
        lab.restore("--link-remap")
        real_criu.wait_for(lambda: len(lab.lines()) > count + 3)
        assert lab.lines()[-1] == f"took {len(lab.lines())}"
    finally:
        os.unlink(f"/dev/shm/sem.{name[1:]}")
        if remap is not None:
            Path(remap.path).unlink(missing_ok=True)

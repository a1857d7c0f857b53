import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest
from procfs_programs import wait_until

from gpuckpt.system import procfs
from gpuckpt.system.procfs import descriptors, elf, reading

DATA = Path(__file__).parents[2] / "data" / "procfs"


def by_fd(process):
    return {descriptor.fd: descriptor for descriptor in process.descriptors}


def test_every_kind_of_descriptor(programs, read, tmp_path):
    child = programs.start(
        """
def put(fd, number):
    os.dup2(fd, number)
path = os.path.join(DIR, 'data')
open(path, 'w').write('0123456789')
file = os.open(path, os.O_RDWR | os.O_APPEND); os.lseek(file, 7, 0); put(file, 100)
put(os.open(DIR, os.O_RDONLY), 101)
put(os.pipe()[0], 102)
os.mkfifo(os.path.join(DIR, 'fifo')); put(os.open(os.path.join(DIR, 'fifo'), os.O_RDWR), 103)
put(socket.socket().detach(), 104)
master, slave = os.openpty(); put(master, 105); put(slave, 106)
put(os.open('/dev/zero', os.O_RDONLY), 107)
put(os.memfd_create('x'), 108)
libc = ctypes.CDLL(None)
put(libc.eventfd(0, 0), 109); put(libc.epoll_create(1), 110)
put(os.open('/proc/self/ns/net', os.O_RDONLY), 111)
put(os.pidfd_open(os.getpid()), 112)
ready(); forever()
"""
    )
    found = by_fd(read(child).processes[0])
    kinds = {fd: found[fd].kind for fd in range(100, 113)}
    expected = [
        "file",
        "directory",
        "pipe",
        "fifo",
        "socket",
        "tty",
        "tty",
        "device",
        "memfd",
        "anon",
        "anon",
        "anon",
        "anon",
    ]
    assert kinds == dict(zip(range(100, 113), expected, strict=True))
    data = (tmp_path / "data").stat()
    file = found[100]
    assert (file.target, file.position, file.device, file.inode) == (
        str(tmp_path / "data"),
        7,
        data.st_dev,
        data.st_ino,
    )
    assert file.flags & os.O_ACCMODE == os.O_RDWR
    assert file.flags & os.O_APPEND
    assert found[107].device == os.makedev(1, 5)
    assert os.major(found[106].device) == 136
    assert not any(found[fd].deleted for fd in (*range(100, 108), *range(109, 113)))


def test_deleted_is_told_from_a_name_that_ends_so(programs, read):
    child = programs.start(
        """
for number, name in ((100, 'gone'), (101, 'stays (deleted)'), (102, 'replaced'), (103, 'linked')):
    fd = os.open(os.path.join(DIR, name), os.O_RDWR | os.O_CREAT); os.dup2(fd, number); os.close(fd)
os.link(os.path.join(DIR, 'linked'), os.path.join(DIR, 'second'))
for name in ('gone', 'replaced', 'linked'): os.unlink(os.path.join(DIR, name))
open(os.path.join(DIR, 'replaced'), 'w').close()
ready(); forever()
"""
    )
    tree = read(child)
    found = by_fd(tree.processes[0])
    assert [found[fd].deleted for fd in range(100, 104)] == [True, False, True, True]
    directory = str(programs.directory)
    files = {
        file.path: file for file in tree.files if f"{child.pid} fd 100" in file.uses or file.path.startswith(directory)
    }
    assert files[f"{directory}/gone"].deleted
    assert files[f"{directory}/gone"].links == 0
    assert not files[f"{directory}/stays (deleted)"].deleted
    assert files[f"{directory}/linked"].deleted
    assert files[f"{directory}/linked"].links == 1


def test_posix_semaphore_is_a_deleted_name_with_another_link(programs, read):
    child = programs.start(
        """
import multiprocessing
lock = multiprocessing.get_context('fork').Semaphore(1)
name = b'/gpuckpt-test-%d' % os.getpid()
libc = ctypes.CDLL(None)
libc.sem_open.restype = ctypes.c_void_p
assert libc.sem_open(name, os.O_CREAT, 0o600, 1)
ready()
while not os.path.exists(os.path.join(DIR, 'end')): time.sleep(0.01)
libc.sem_unlink(name); ready('ended'); forever()
"""
    )
    try:
        files = [file for file in read(child).files if file.path.startswith("/dev/shm/")]
        assert sorted(file.links for file in files) == [0, 1]
        assert all(file.uses == (f"{child.pid} map shared-write",) and file.deleted for file in files)
    finally:
        (programs.directory / "end").touch()
        Path(f"/dev/shm/sem.gpuckpt-test-{child.pid}").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "lock",
    [
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "fcntl.lockf(file, fcntl.LOCK_EX)",
        "fcntl.fcntl(file, 37, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))",  # F_OFD_SETLK
    ],
)
def test_file_locks(programs, read, lock):
    code = f"file = open(os.path.join(DIR, 'l'), 'w'); {{}} ; ready(); forever()"  # noqa: F541
    assert read(programs.start(code.format(lock))).file_locks
    assert not read(programs.start(code.format("pass"))).file_locks


def test_paths_that_are_no_text_survive(programs, read, tmp_path):
    child = programs.start(
        r"""
path = os.fsencode(DIR) + b'/b\xff\n\\012 \rx'
os.mkdir(path); os.chdir(path)
with open(path + b'/f', 'wb') as file: file.write(b'x' * 5000)
file = open(path + b'/f', 'rb'); keep = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); os.closerange(3, 256)  # mmap keeps a copy
ready(); forever()
"""
    )
    path = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\n\\012 \rx")
    tree = read(child)
    assert tree.processes[0].cwd == path
    mapped = next(file for file in tree.files if file.path == path + "/f")
    assert mapped.uses == (f"{child.pid} map",)
    assert mapped.size == 5000


GPU = """
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
assert libc.mount(b'none', b'/', None, 0x44000, None) == 0
assert libc.mount(b'none', b'/dev', b'tmpfs', 0, None) == 0
for name, minor in (('nvidia0', 5), ('other', 5), ('plain', 3)):
    os.mknod('/dev/' + name, 0o600 | 0x2000, os.makedev(1, minor))
fd = os.open('/dev/nvidia0', os.O_RDWR); os.dup2(fd, 100)
os.dup2(os.open('/dev/plain', os.O_RDWR), 101)
keep = [mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE, offset=4096 * n, prot=1 + n % 2) for n in range(3)]
other = os.open('/dev/other', os.O_RDWR); kept = mmap.mmap(other, 4096, flags=mmap.MAP_PRIVATE); os.close(other); os.close(fd)
ready(); forever()
"""


MANAGED = """
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
assert libc.unshare(0x20000) == 0
assert libc.mount(b'none', b'/', None, 0x44000, None) == 0
assert libc.mount(b'none', b'/dev', b'tmpfs', 0, None) == 0
os.mknod('/dev/nvidia-uvm', 0o600 | 0x2000, os.makedev(1, 5))
fd = os.open('/dev/nvidia-uvm', os.O_RDWR)
assert libc.mmap(0x204a00000, 2 << 20, 3, 0x100012, fd, 0) == 0x204a00000  # MAP_PRIVATE, MAP_FIXED_NOREPLACE
keep = [libc.mmap(None, size << 20, 3, 2, fd, 0) for size in sizes]
os.close(fd)
ready(); forever()
"""


@pytest.mark.parametrize(("sizes", "managed"), [([], 0), ([8], 8 << 20), ([2, 256], 258 << 20)])
def test_managed_memory_is_what_the_driver_has_not_mapped_for_itself(programs, sizes, managed):
    child = programs.start(f"sizes = {sizes}\n{MANAGED}")
    (found,) = procfs.gpu_files(child.pid)
    assert (found.path, found.managed_bytes) == ("/dev/nvidia-uvm", managed)


def test_gpu_files_by_name(programs, read):
    # Memory devices under a GPU's name, in the program's own mount namespace: /proc shows them as it would a GPU.
    child = programs.start(GPU)
    found = procfs.gpu_files(child.pid)
    assert ("fd 100", "/dev/nvidia0") in [(gpu.where, gpu.path) for gpu in found]
    mapped = [gpu.where for gpu in found if not gpu.where.startswith("fd")]
    assert len(mapped) == 1
    assert "-" in mapped[0]
    assert {gpu.path for gpu in found} == {"/dev/nvidia0"}
    tree = read(child)
    assert tree.processes[0].gpu_files == found
    assert not any(file.path.startswith("/dev/nvidia") for file in tree.files)
    assert "/dev/plain" in {file.path for file in tree.files}


def test_gpu_files_by_device_number(programs):
    child = programs.start(GPU)
    opened, mappings = descriptors.descriptors_of(child.pid), procfs.maps_of(child.pid)
    found = descriptors.find_gpu_files(child.pid, opened, mappings, frozenset([1]))
    assert "/dev/other" in {gpu.path for gpu in found if not gpu.where.startswith("fd")}
    assert ("fd 101", "/dev/plain") in [(gpu.where, gpu.path) for gpu in found]


def test_gpu_majors_from_a_recorded_list():
    assert descriptors.parse_gpu_majors((DATA / "devices-nvidia-580").read_text()) == frozenset(
        [195, 235, 236, 237, 509, 511]
    )


def test_io_uring(programs, read):
    setup = "ring = ctypes.CDLL(None).syscall(425, 4, (ctypes.c_char * 120)())\n"
    child = programs.start(setup + "open(os.path.join(DIR, 'ring'), 'w').write(str(ring)); ready(); forever()")
    if (programs.directory / "ring").read_text() == "-1":
        pytest.skip("this kernel has no io_uring or forbids it")
    assert procfs.uses_io_uring(child.pid)
    assert read(child).processes[0].io_uring
    mapped = programs.start(
        setup + "keep = mmap.mmap(ring, 4096, flags=mmap.MAP_SHARED); os.closerange(3, 256); ready(); forever()"
    )
    assert descriptors.IO_URING not in {fact.target for fact in read(mapped).processes[0].descriptors}
    assert procfs.uses_io_uring(mapped.pid)
    assert not procfs.uses_io_uring(os.getpid())


def test_maps_of_a_recorded_process():
    found = list(reading.parse_maps((DATA / "maps-6.18").read_bytes()))
    assert [mapping.path for mapping in found] == [
        "/usr/bin/with  two blanks ",
        "[heap]",
        "",
        "/dev/zero (deleted)",
        "anon_inode:[io_uring]",
        "/dev/nvidiactl",
        os.fsdecode(b"/srv/b\xff"),
        "[vsyscall]",
    ]
    assert found[0].perms == "r-xp"
    assert (found[0].start, found[0].end, found[0].offset, found[0].inode) == (
        0x55E51B7B6000,
        0x55E51B7BA000,
        0x2000,
        26723,
    )
    assert found[0].range == "55e51b7b6000-55e51b7ba000"
    assert found[3].device == "00:01"


def test_build_ids_are_those_of_readelf(programs, read):
    files = [file for file in read(programs.start("ready(); forever()")).files if "map" in " ".join(file.uses)]
    compared = 0
    for file in files:
        shown = subprocess.run(["readelf", "-n", file.path], capture_output=True, text=True, check=False).stdout
        expected = shown.partition("Build ID: ")[2].split("\n")[0] or None
        assert file.build_id == expected, file.path
        compared += expected is not None
    assert compared >= 2


def test_build_id_of_a_deleted_program(programs, read, tmp_path):
    copy = tmp_path / "sleep"
    shutil.copy("/bin/sleep", copy)
    expected = elf.build_id("/bin/sleep")
    assert expected
    child = programs.start(f"ready(); os.execv({str(copy)!r}, ['sleep', '1000'])")
    # The link is there before the mappings are.
    wait_until(lambda: [m for m in procfs.maps_of(child.pid) if m.path == str(copy) and "x" in m.perms], "exec")
    copy.unlink()
    tree = read(child)
    exe = next(file for file in tree.files if f"{child.pid} exe" in file.uses)
    assert (exe.path, exe.deleted, exe.build_id) == (str(copy), True, expected)
    assert f"{child.pid} map" in exe.uses


def test_build_id_of_other_byte_orders_and_word_sizes(tmp_path):
    def note(order):
        return (
            struct.pack(order + "III", 4, 3, 7)
            + b"abc\0"
            + b"xyz\0"
            + struct.pack(order + "III", 4, 4, 3)
            + b"GNU\0"
            + b"\1\2\3\4"
        )

    for word, order in ((1, "<"), (1, ">"), (2, "<"), (2, ">")):
        body = note(order)
        ident = b"\x7fELF" + bytes([word, 1 if order == "<" else 2]) + bytes(10)
        if word == 2:
            head = struct.pack(order + "HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
            segment = struct.pack(order + "IIQQQQQQ", 4, 4, 120, 0, 0, len(body), len(body), 4)
        else:
            head = struct.pack(order + "HHIIIIIHHHHHH", 3, 3, 1, 0, 52, 0, 0, 52, 32, 1, 0, 0, 0)
            segment = struct.pack(order + "IIIIIIII", 4, 84, 0, 0, len(body), len(body), 4, 4)
        path = tmp_path / "elf"
        path.write_bytes(ident + head + segment + body)
        assert elf.build_id(str(path)) == "01020304"
        path.write_bytes((ident + head + segment + body)[:70])
        assert elf.build_id(str(path)) is None
    (tmp_path / "text").write_text("#!/bin/sh\n")
    assert elf.build_id(str(tmp_path / "text")) is None
    assert elf.build_id(str(tmp_path / "missing")) is None


def test_files_of_a_tree(programs, read, tmp_path):
    child = programs.start(
        """
os.mkdir(os.path.join(DIR, 'cwd')); os.chdir(os.path.join(DIR, 'cwd'))
path = os.path.join(DIR, 'data'); open(path, 'wb').write(b'x' * 10000); os.chmod(path, 0o640); os.chown(path, 12, 34)
reader = os.open(path, os.O_RDONLY); os.dup2(reader, 100)
log = os.open(os.path.join(DIR, 'log'), os.O_WRONLY | os.O_APPEND | os.O_CREAT); os.write(log, b'abc'); os.dup2(log, 101)
both = os.open(path, os.O_RDWR); os.lseek(both, 5, 0); os.dup2(both, 102)
shared = mmap.mmap(both, 4096); private = mmap.mmap(both, 4096, flags=mmap.MAP_PRIVATE)
private[0:1] = b'y'
hidden = mmap.mmap(-1, 1 << 20); memfd = os.memfd_create('m'); os.ftruncate(memfd, 4096); kept = mmap.mmap(memfd, 4096)
if os.fork() == 0:
    ready(); forever()
forever()
"""
    )
    tree = read(child)
    assert len(tree.processes) == 2
    files = {file.path: file for file in tree.files}
    data = files[str(tmp_path / "data")]
    grandchild = tree.pids[1]
    for pid in (child.pid, grandchild):
        assert {f"{pid} fd 100", f"{pid} fd 102", f"{pid} map", f"{pid} map shared-write"} <= set(data.uses)
    real = (tmp_path / "data").stat()
    assert (data.size, data.mode, data.uid, data.gid, data.mtime) == (
        10000,
        stat.S_IFREG | 0o640,
        12,
        34,
        real.st_mtime,
    )
    assert (data.device, data.inode, data.links, data.blocks_bytes) == (
        real.st_dev,
        real.st_ino,
        1,
        real.st_blocks * 512,
    )
    assert data.flags & os.O_ACCMODE == os.O_RDWR
    assert data.position == 5
    log = files[str(tmp_path / "log")]
    assert log.flags & (os.O_ACCMODE | os.O_APPEND) == os.O_WRONLY | os.O_APPEND
    assert log.position == 3
    assert f"{child.pid} cwd" in files[str(tmp_path / "cwd")].uses
    assert f"{child.pid} root" in files["/"].uses
    exe = files[tree.processes[0].exe]
    assert f"{child.pid} exe" in exe.uses
    assert not [path for path in files if path.startswith(("/memfd", "/dev/zero", "/proc"))]


def test_a_mapped_path_with_a_carriage_return_is_one_line():
    line = "7f4000000000-7f4000001000 r--p 00000000 fe:00 77    /srv/a\rb\x85c\n".encode()
    assert [mapping.path for mapping in reading.parse_maps(line)] == ["/srv/a\rb\x85c"]


def test_files_of_another_mount_namespace(programs, read, tmp_path):
    child = programs.start(
        """
libc = ctypes.CDLL(None)
inner = os.path.join(DIR, 'inner'); os.mkdir(inner)
assert libc.unshare(0x20000) == 0
assert libc.mount(b'none', b'/', None, 0x44000, None) == 0
assert libc.mount(b'none', inner.encode(), b'tmpfs', 0, None) == 0
path = os.path.join(inner, 'f'); open(path, 'w').write('x' * 1234)
file = open(path); keep = mmap.mmap(file.fileno(), 0, prot=1)
kept = open(os.path.join(inner, 'name (deleted)'), 'w');
ready(); forever()
"""
    )
    tree = read(child)
    files = {file.path: file for file in tree.files}
    inner = files[str(tmp_path / "inner" / "f")]
    assert inner.size == 1234
    assert set(inner.uses) == {f"{child.pid} map"} | {use for use in inner.uses if " fd " in use}
    assert not files[str(tmp_path / "inner" / "name (deleted)")].deleted
    assert not (tmp_path / "inner" / "f").exists()
    assert tree.processes[0].namespaces["mnt"] != os.readlink("/proc/self/ns/mnt")
    assert tree.processes[0].namespaces["net"] == os.readlink("/proc/self/ns/net")

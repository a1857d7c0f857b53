"""Process 1 of the namespaces that a restored tree has for itself.

It runs alone (`python -I -S`, no package around it): nsinit.py CONTROL-FD PROGRAM [ARGUMENT ...]. CONTROL-FD is
one end of a socket pair; lines of JSON go both ways.

steps, and what an end of the owner, or of this process, at each leaves:

1. `init PID` is said (the pid as the owner sees it), the order is awaited    nothing
2. namespaces are filled: /proc, lo, /dev/shm, files in it                    nothing: all of it is the namespaces'
3. CRIU is started (`criu PID`), its end is told (`ended STATUS`)             nothing: the kernel ends what is in
                                                                              the pid namespace with its process 1
4. `keep` is heard                                                            a whole tree, which needs no owner
5. the tree's root ends                                                       nothing: whatever it left running ends

Without a pid namespace (`--isolate net` alone) it becomes CRIU after step 2, and there is nothing to stay for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

Order = dict[str, Any]
"""What the owner wants: Enclosed of owner/messages.py, and the `root` of the tree by its pid in there."""

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
CLONE_NEWPID = 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 0x4000, 1 << 19
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
MNT_DETACH = 2
PR_SET_NAME = 15
SYS_OPEN_TREE, SYS_MOVE_MOUNT = 428, 429
"""The same on every architecture, from Linux 5.2 on."""
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, AT_FDCWD = 1, 4, -100
SPARE = 1000
LOWEST = 300
"""What the kernel begins anew at when it has come to the highest pid (RESERVED_PIDS)."""
STEP_SECONDS = 0.02
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the mount point that shm_open(3) uses

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(what: str, function: str, *arguments: object) -> None:
    """One C call that gives 0; raises OSError with what it was for."""
    if getattr(libc, function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


class Control:
    """The conversation with the owner."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no keyword
        self._end = socket.socket(fileno=descriptor)
        self._buffer = b""

    def say(self, **words: object) -> None:
        """A line; raises OSError when nobody is there."""
        self._end.sendall(json.dumps(words).encode() + b"\n")

    def hear(self, timeout: float | None) -> Order | None:
        """The next line, or None after `timeout` seconds; raises EOFError when the owner has ended."""
        while b"\n" not in self._buffer:
            if not select.select([self._end], [], [], timeout)[0]:
                return None
            chunk = self._end.recv(1 << 20)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: Order = json.loads(line)
        return said

    def fileno(self) -> int:
        """Its descriptor."""
        return self._end.fileno()


def enter(order: Order) -> None:
    """The namespaces of this process: a network (new, or one that has a name), mounts where /proc is another."""
    # By descriptors of mounts: the paths may lead through a /proc that is not ours for long.
    order["trees"] = [(open_tree(source), target) for source, target in order["binds"]]
    if order["netns"]:
        descriptor = os.open(order["netns"], os.O_RDONLY | os.O_CLOEXEC)
        call(f"the network namespace {order['netns']} cannot be entered", "setns", descriptor, CLONE_NEWNET)
        os.close(descriptor)
    elif order["net"]:
        call("no network namespace can be made", "unshare", CLONE_NEWNET)
    if order["pid"]:
        call("no pid namespace can be made", "unshare", CLONE_NEWNS | CLONE_NEWPID)


def open_tree(source: str) -> int:
    """A directory as a mount that can be put anywhere, whatever namespace it is moved to (open_tree(2))."""
    found: int = libc.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(source), OPEN_TREE_CLONE | os.O_CLOEXEC)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{source} cannot be shown in a namespace: {os.strerror(code)}")
    return found


def show(tree: int, target: str) -> None:
    """Put it there (move_mount(2)); never seen outside."""
    what = f"{target} cannot be mounted"
    call(what, "syscall", SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def hide(order: Order) -> None:
    """CRIU has read it all: the file systems of the image are not kept busy."""
    for _, target in order["binds"]:
        libc.umount2(os.fsencode(target), MNT_DETACH)


def fill(order: Order) -> None:
    """What the tree finds there."""
    if order["net"]:
        bring_up_loopback()
    if not order["pid"]:
        return
    # What the host mounts and unmounts later happens here, too; what is done here stays here.
    call("mounts cannot be made our own", "mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    for tree, target in order["trees"]:
        show(tree, target)
    mount(b"proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"")
    spare_pids(order["needed"])
    if order["shm"]:
        own_shared_memory(order["files"])


def mount(kind: bytes, where: str, flags: int, data: bytes) -> None:
    """A file system of its own."""
    call(f"{where} cannot be mounted", "mount", kind, where.encode(), kind, flags, data)


def bring_up_loopback() -> None:
    """Without lo CRIU does not even start (kerndat_tcp_repair), nor could the tree talk to itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        name = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(anything, SIOCGIFFLAGS, name))[1]
        fcntl.ioctl(anything, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def spare_pids(needed: list[int]) -> None:
    """CRIU, its helpers and what the tree starts next get pids that the tree does not need at its restore."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max") as file:  # noqa: PTH123
        last = last_before_spare(needed, int(file.read()))
        with open("/proc/sys/kernel/ns_last_pid", "w") as setting:  # noqa: PTH123
            setting.write(str(last))


def last_before_spare(needed: list[int], highest: int) -> int:
    """A pid after which SPARE pids are free of the needed ones; 0 where there is no such place."""
    above = max(needed, default=0) + SPARE
    if above + SPARE < highest:
        return above
    edges = sorted({LOWEST, *needed, highest})
    return next((low for low, high in zip(edges, edges[1:], strict=False) if high - low > SPARE), 0)  # noqa: RUF007


def own_shared_memory(files: list[Order]) -> None:
    """An empty /dev/shm as large as the host's, with the tree's own files in it."""
    # Opened before: they may lie in the old one.
    sources = [os.open(one["source"], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) for one in files]
    room = os.statvfs(SHARED_MEMORY)
    size = room.f_blocks * room.f_frsize
    mount(b"tmpfs", SHARED_MEMORY, MS_NOSUID | MS_NODEV, f"mode=1777,size={size}".encode())
    for one, source in zip(files, sources, strict=True):
        try:
            put(one, source)
        except OSError as error:
            what = f"{one['path']} cannot be made in the tree's own {SHARED_MEMORY}: {error.strerror}"
            raise OSError(error.errno, what) from None
        finally:
            os.close(source)


def put(one: Order, source: int) -> None:
    """One file of the image, with its further name."""
    if os.path.lexists(one["path"]):
        return  # made as the further name of another
    os.makedirs(os.path.dirname(one["path"]), exist_ok=True)  # noqa: PTH103, PTH120
    if one["link_to"] and os.path.lexists(one["link_to"]):
        os.link(one["link_to"], one["path"])
        return
    descriptor = os.open(one["path"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        copy(source, descriptor)
        os.fchown(descriptor, one["uid"], one["gid"])
        os.fchmod(descriptor, one["mode"])
        os.utime(descriptor, ns=(one["mtime_ns"], one["mtime_ns"]))
    finally:
        os.close(descriptor)
    if one["link_to"]:
        os.link(one["path"], one["link_to"])


def copy(source: int, target: int) -> None:
    """All of a file but its holes, which take no memory here either."""
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(target, size)
    while at < size:
        try:
            data = os.lseek(source, at, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole is left
        at = os.lseek(source, data, os.SEEK_HOLE)
        os.lseek(target, data, os.SEEK_SET)
        while data < at:
            sent = os.sendfile(target, source, data, at - data)
            if not sent:
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # somebody has cut the image's file
            data += sent


def main() -> None:
    """Enter, and be process 1 where there is a pid namespace, else become CRIU."""
    control, argv = Control(int(sys.argv[1])), sys.argv[2:]
    try:
        order = control.hear(None)
        assert order is not None  # noqa: S101 - without a limit there is a line, or an end
        enter(order)
        if not order["pid"]:
            fill(order)
            os.execv(argv[0], argv)  # noqa: S606 - no shell
        child = os.fork()  # noqa: TID251 - process 1 cannot be made in another way
        if child:
            control.say(init=child)
            os._exit(0)
        be_init(control, order, argv)
    except EOFError:
        sys.exit(1)
    except OSError as error:
        with contextlib.suppress(OSError):
            control.say(failed=f"{error.strerror}{named(error)}", errno=error.errno)
        sys.exit(1)


def named(error: OSError) -> str:
    """The file that an error is about, in brackets."""
    return f" ({error.filename})" if error.filename else ""


def be_init(control: Control, order: Order, argv: list[str]) -> None:
    """Process 1: it starts CRIU, reaps, and ends with the tree, or with an owner that has not said `keep`."""
    # A handler of Python's own would let a program of the tree end us; the kernel ignores the default for process 1.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control.hear(None)  # `go`: what we are stands in the journal
    fill(order)
    show_name(f"gpuckpt: init of {order['image']}")
    criu = os.posix_spawn(argv[0], argv, os.environ, setsid=True, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
    # What only CRIU shall have open, the tree's streams among it: who reads them waits for their end.
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    control.say(criu=criu)
    ended = build(control, criu, order["root"])
    hide(order)
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.close(null)
    status = ended.get(order["root"])
    while status is None:
        pid, how = os.wait()
        status = how if pid == order["root"] else None
    os._exit(shell_status(status))


def show_name(title: str) -> None:
    """What `ps` and `top` show, instead of a Python with the arguments of a CRIU."""
    libc.prctl(PR_SET_NAME, b"gpuckpt-init", 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123
        fields = file.read().rpartition(b")")[2].split()
    # arg_start and arg_end (proc_pid_stat(5)): Python has made copies of what stands there.
    start, end = int(fields[45]), int(fields[46])
    if start:
        ctypes.memmove(start, os.fsencode(title)[: end - start - 1].ljust(end - start, b"\0"), end - start)


def build(control: Control, criu: int, root: int) -> dict[int, int]:
    """Until the owner has said `keep` and CRIU has ended well; what has ended by then, with its status."""
    ended: dict[int, int] = {}
    kept = False
    while not (kept and criu in ended):
        kept = kept or has_kept(control)
        if kept:
            time.sleep(STEP_SECONDS)
        for pid, status in reaped():
            if pid == criu:
                tell_end(control, status, kept=kept)
            if pid in (criu, root):
                ended[pid] = status
    return ended


def has_kept(control: Control) -> bool:
    """Listen for a moment; raises EOFError when the owner ends without having said it."""
    said = control.hear(STEP_SECONDS)
    return said is not None and "keep" in said


def tell_end(control: Control, status: int, *, kept: bool) -> None:
    """Of CRIU; after one that failed nothing is left to stay for."""
    try:
        control.say(ended=os.waitstatus_to_exitcode(status))
    except OSError:
        if not kept:
            raise
    if status:
        sys.exit(1)


def reaped() -> list[tuple[int, int]]:
    """Children that have ended, and how."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (seen := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(seen)
    return found


def shell_status(status: int) -> int:
    """A wait status as a shell has it: 128+n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()

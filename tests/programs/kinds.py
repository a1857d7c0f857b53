"""One kind of process per name: kinds.py KIND LOG [ARGUMENT]

Every kind sets something up and then counts: number n goes into LOG only after the whole of it was used with n
and gave n back, so a log without a gap proves that all of it came back from an image. What is not as it was
writes 'BROKEN WHY' and ends the count.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import mmap
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tty

PAUSE_SECONDS = 0.03
WORD = struct.Struct("<q")
LIBC = ctypes.CDLL(None, use_errno=True)


def expect(found: object, wanted: object, what: str) -> None:
    """What was set up must be what it was."""
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} instead of {wanted!r}")


def fork(work) -> int:
    """A child that does `work` for ever and ends with its parent."""
    child = os.fork()
    if child == 0:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        try:
            work()
        finally:
            os._exit(1)
    return child


def receive(read) -> bytes:
    """Exactly one word; an end of file means that the other side is lost."""
    found = b""
    while len(found) < WORD.size:
        piece = read(WORD.size - len(found))
        if not piece:
            raise EOFError("the other end is gone")
        found += piece
    return found


def ring(_: str):
    """root -pipe-> a -unix stream-> b -unix datagram with a name-> c -TCP-> root: everything a tree talks through."""
    pipe_out, pipe_in = os.pipe()
    left, right = socket.socketpair()
    name = f"\0gpuckpt-kinds-{os.getpid()}"
    listener = socket.create_server(("127.0.0.1", 0))

    def first() -> None:
        while True:
            left.sendall(receive(lambda size: os.read(pipe_out, size)))

    def second() -> None:
        out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        while True:
            out.sendto(receive(right.recv), name)

    def third() -> None:
        mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        mailbox.bind(name)
        out = socket.create_connection(listener.getsockname())
        while True:
            out.sendall(mailbox.recv(WORD.size))

    fork(third)
    back, _ = listener.accept()
    fork(first)
    fork(second)

    def step(number: int) -> None:
        os.write(pipe_in, WORD.pack(number))
        expect(receive(back.recv), WORD.pack(number), "what went round")

    return step


def hundred(_: str):
    """A hundred processes: what the root says goes through 99 others before it comes back."""
    out, into = os.pipe()
    for _number in range(99):
        next_out, next_in = os.pipe()
        subprocess.Popen(["cat"], stdin=out, stdout=next_in)
        os.close(out)
        os.close(next_in)
        out = next_out

    def step(number: int) -> None:
        os.write(into, WORD.pack(number))
        expect(receive(lambda size: os.read(out, size)), WORD.pack(number), "what came back")

    return step


def threads(_: str):
    """Four threads with a stack and an identity of their own, woken through condition variables."""
    asked = [threading.Semaphore(0) for _ in range(4)]
    done = threading.Semaphore(0)
    counts = [0] * 4

    def work(index: int) -> None:
        own, at_first = 0, (threading.get_native_id(), threading.get_ident())
        while True:
            asked[index].acquire()
            own += 1
            expect((threading.get_native_id(), threading.get_ident()), at_first, "a thread's identity")
            counts[index] = own
            done.release()

    for index in range(4):
        threading.Thread(target=work, args=(index,), daemon=True).start()

    def step(number: int) -> None:
        for semaphore in asked:
            semaphore.release()
        for _ in asked:
            if not done.acquire(timeout=30):
                raise AssertionError("a thread is lost")
        expect(counts, [number] * 4, "the counts of the threads")

    return step


def shared(_: str):
    """Anonymous memory that a child shares and writes."""
    memory = mmap.mmap(-1, 1 << 20)
    memory[8:] = bytes(range(256)) * 4095 + bytes(248)
    digest = hashlib.sha256(memory[8:]).digest()
    ask_out, ask_in = os.pipe()
    answer_out, answer_in = os.pipe()

    def child() -> None:
        while True:
            os.read(ask_out, 1)
            memory[:8] = WORD.pack(WORD.unpack(memory[:8])[0] + 1)
            os.write(answer_in, b"x")

    fork(child)

    def step(number: int) -> None:
        os.write(ask_in, b"x")
        os.read(answer_out, 1)
        expect(WORD.unpack(memory[:8])[0], number, "the child's count in shared memory")
        expect(hashlib.sha256(memory[8:]).digest(), digest, "the rest of shared memory")

    return step


def memfd(_: str):
    """A sealed memfd that a child has mapped."""
    descriptor = os.memfd_create("kinds", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, 1 << 20)
    os.pwrite(descriptor, os.urandom(1 << 19), 1 << 19)
    digest = hashlib.sha256(os.pread(descriptor, 1 << 19, 1 << 19)).digest()
    seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    ask_out, ask_in = os.pipe()
    answer_out, answer_in = os.pipe()

    def child() -> None:
        memory = mmap.mmap(descriptor, 1 << 20)
        while True:
            os.read(ask_out, 1)
            memory[:8] = WORD.pack(WORD.unpack(memory[:8])[0] + 1)
            os.write(answer_in, b"x")

    fork(child)

    def step(number: int) -> None:
        os.write(ask_in, b"x")
        os.read(answer_out, 1)
        expect(WORD.unpack(os.pread(descriptor, 8, 0))[0], number, "the child's count in the memfd")
        expect(hashlib.sha256(os.pread(descriptor, 1 << 19, 1 << 19)).digest(), digest, "the memfd's content")
        expect(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), seals, "the seals")

    return step


def deleted(directory: str):
    """Open files without a name: a small one that is written, one above CRIU's own limit of 1 MiB, a mapped one."""
    paths = [os.path.join(directory, name) for name in ("small", "large", "mapped")]
    small, large, mapped = (os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) for path in paths)
    os.write(large, os.urandom(3_000_000))
    os.truncate(mapped, 1 << 16)
    memory = mmap.mmap(mapped, 1 << 16)
    os.close(mapped)
    for path in paths:
        os.unlink(path)
    digest = hashlib.sha256(os.pread(large, 4_000_000, 0)).digest()

    def step(number: int) -> None:
        expect(WORD.unpack(os.pread(small, 8, 0) or bytes(8))[0], number - 1, "the small file's number")
        expect(WORD.unpack(memory[:8])[0], number - 1, "the mapped file's number")
        os.pwrite(small, WORD.pack(number), 0)
        memory[:8] = WORD.pack(number)
        expect(hashlib.sha256(os.pread(large, 4_000_000, 0)).digest(), digest, "the large file's content")
        expect(any(os.path.exists(path) for path in paths), False, "the files have a name")

    return step


def successor(number: int) -> int:
    """What the pool is asked."""
    return number + 1


def pool(method: str):
    """multiprocessing's pool: POSIX semaphores, a resource tracker, a forkserver."""
    workers = multiprocessing.get_context(method).Pool(2)

    def step(number: int) -> None:
        answers = workers.map_async(successor, [number] * 4).get(timeout=60)
        expect(answers, [number + 1] * 4, "the pool's answers")

    return step


def semaphore(name: str):
    """sem_open by name in two processes; the name stays, as the program's users expect it to."""
    LIBC.sem_open.restype = ctypes.c_void_p

    def open_named(suffix: str) -> ctypes.c_void_p:
        found = LIBC.sem_open(f"/{name}-{suffix}".encode(), os.O_CREAT, 0o600, 0)
        if not found:
            raise OSError(ctypes.get_errno(), "sem_open")
        return ctypes.c_void_p(found)

    ask, answer = open_named("ask"), open_named("answer")

    def child() -> None:
        mine = open_named("ask"), open_named("answer")
        while True:
            LIBC.sem_wait(mine[0])
            LIBC.sem_post(mine[1])

    fork(child)

    def step(_number: int) -> None:
        LIBC.sem_post(ask)
        deadline = (ctypes.c_long * 2)(int(time.time()) + 30, 0)
        expect(LIBC.sem_timedwait(answer, deadline), 0, "sem_timedwait")

    return step


def terminal(_: str):
    """A pty wholly inside the tree: a child leads the session of its slave and answers what is typed."""
    master, slave = os.openpty()
    tty.setraw(slave)

    def child() -> None:
        os.setsid()
        fcntl.ioctl(slave, 0x540E, 0)  # TIOCSCTTY
        os.close(master)
        while True:
            expect(os.tcgetpgrp(slave), os.getpid(), "the terminal's foreground group")
            os.write(slave, os.read(slave, 100)[::-1])

    fork(child)
    os.close(slave)

    def step(number: int) -> None:
        os.write(master, b"%d" % number)
        answer = b""
        while len(answer) < len(b"%d" % number):
            if not select.select([master], [], [], 30)[0]:
                raise AssertionError("nothing comes back through the pty")
            answer += os.read(master, 100)
        expect(answer, (b"%d" % number)[::-1], "what came back through the pty")

    return step


def cwd(directory: str):
    """Works in a directory by relative names."""
    os.chdir(directory)

    def step(number: int) -> None:
        expect(os.getcwd(), directory, "the working directory")
        with open("here", "w") as file:
            file.write(f"{number}")
        expect(os.path.exists(os.path.join(directory, "here")), True, "the relative name leads there")

    return step


def cwd_gone(directory: str):
    """The working directory was removed."""
    os.mkdir(directory)
    os.chdir(directory)
    os.rmdir(directory)

    def step(_number: int) -> None:
        expect(os.listdir("."), [], "the content of the directory without a name")
        expect(os.path.exists(directory), False, "the directory has a name")

    return step


def cow(_: str):
    """Two children that share 16 MB with their parent copy-on-write; each changes pages of its own."""
    memory = bytearray(os.urandom(16_000_000))
    children = []
    for index in range(2):
        asks, answers = os.pipe(), os.pipe()

        def child(index=index, asks=asks, answers=answers) -> None:
            for page in range(20):
                memory[(20 * index + page) << 12] ^= 0xFF
            digest = hashlib.sha256(memory).digest()
            while True:
                os.read(asks[0], 1)
                os.write(answers[1], b"y" if hashlib.sha256(memory).digest() == digest else b"n")

        fork(child)
        children.append((asks[1], answers[0]))
    digest = hashlib.sha256(memory).digest()

    def step(_number: int) -> None:
        for ask, _ in children:
            os.write(ask, b"x")
        for _, answer in children:
            expect(os.read(answer, 1), b"y", "a child's memory")
        expect(hashlib.sha256(memory).digest(), digest, "the parent's memory")

    return step


def locks(directory: str):
    """Holds a flock and a POSIX lock; a child that asks for them must be turned away."""
    files = [os.open(os.path.join(directory, name), os.O_RDWR | os.O_CREAT, 0o600) for name in ("flock", "posix")]
    fcntl.flock(files[0], fcntl.LOCK_EX)
    fcntl.lockf(files[1], fcntl.LOCK_EX, 10, 5)
    asks, answers = os.pipe(), os.pipe()

    def child() -> None:
        own = os.open(os.path.join(directory, "flock"), os.O_RDWR)
        while True:
            os.read(asks[0], 1)
            got = 0
            for attempt in (
                lambda: fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB),
                lambda: fcntl.lockf(files[1], fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5),
            ):
                try:
                    attempt()
                    got += 1
                except OSError:
                    continue
            os.write(answers[1], b"%d" % got)

    fork(child)

    def step(_number: int) -> None:
        os.write(asks[1], b"x")
        expect(os.read(answers[0], 1), b"0", "locks the child could take")

    return step


def events(_: str):
    """epoll over an eventfd, a timerfd and a signalfd, with a blocked signal and an interval timer."""
    event = LIBC.eventfd(0, 0)
    timer = LIBC.timerfd_create(1, 0)  # CLOCK_MONOTONIC
    LIBC.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 10_000_000, 0, 10_000_000), None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    mask = (ctypes.c_ulong * 16)(1 << (signal.SIGUSR2 - 1))
    signals = LIBC.signalfd(-1, mask, 0)
    alarms = []
    signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    poller = select.epoll()
    for descriptor in (event, timer, signals):
        poller.register(descriptor, select.EPOLLIN)

    def await_one(descriptor: int) -> None:
        deadline = time.monotonic() + 30
        while not any(found == descriptor for found, _ in poller.poll(1)):
            if time.monotonic() > deadline:
                raise AssertionError(f"epoll never reported {descriptor}")

    def step(number: int) -> None:
        os.write(event, WORD.pack(number))
        await_one(event)
        expect(WORD.unpack(os.read(event, 8))[0], number, "the eventfd's count")
        await_one(timer)
        os.read(timer, 8)
        os.kill(os.getpid(), signal.SIGUSR2)
        await_one(signals)
        expect(struct.unpack("<I", os.read(signals, 128)[:4])[0], signal.SIGUSR2, "the signal read")
        before = len(alarms)
        deadline = time.monotonic() + 30
        while len(alarms) == before and time.monotonic() < deadline:
            time.sleep(0.005)
        expect(len(alarms) > before, True, "the interval timer goes on")

    return step


KINDS = {
    work.__name__: work
    for work in (
        ring,
        hundred,
        threads,
        shared,
        memfd,
        deleted,
        pool,
        semaphore,
        terminal,
        cwd,
        cwd_gone,
        cow,
        locks,
        events,
    )
}


def main(kind: str, log: str, argument: str) -> None:
    """Set up, then count for ever."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    step = KINDS[kind](argument)
    for number in itertools.count(1):
        try:
            step(number)
        except BaseException as error:
            os.write(out, f"BROKEN {type(error).__name__}: {error}\n".encode())
            raise
        os.write(out, b"%d\n" % number)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")

"""Process 1 of an emulated host (tests/twohosts.py): host_init.py NAME SRV SSHD SSHD_CONFIG SSHD_LOG

Runs in fresh mount, pid, uts, ipc and net namespaces. Says `ready` when its file systems are there, starts sshd at
each line on stdin (the network is up by then), reaps whatever ends, and goes with the end of stdin: with it
the kernel ends every process of the host, also when the tests were killed.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def mount(*arguments: str) -> None:
    """Mount something for this host alone."""
    subprocess.run(["mount", *arguments], check=True)


def know_the_user_of_sshd() -> None:
    """sshd gives root up to this user; where OpenSSH was never installed there is none."""
    users = Path("/etc/passwd").read_text()
    if "\nsshd:" not in users:
        Path("/run/passwd").write_text(f"{users.rstrip()}\nsshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n")
        mount("--bind", "/run/passwd", "/etc/passwd")


def raise_loopback() -> None:
    """Without it CRIU cannot start. By netdevice(7), for not every host has `ip`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def do_as_told(argv: list[str]) -> None:
    """Start sshd when told so; go when the tests do."""
    while os.read(0, 1):
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    os._exit(0)


def main(name: str, srv: str, *sshd: str) -> None:
    """Set the host up, then reap for ever."""
    Path("/proc/sys/kernel/hostname").write_text(name)
    mount("--make-rprivate", "/")
    mount("--bind", srv, "/srv")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    Path("/run/sshd").mkdir(mode=0o755)
    know_the_user_of_sshd()
    raise_loopback()
    print("ready", flush=True)
    program, config, log = sshd
    threading.Thread(target=do_as_told, args=([program, "-D", "-f", config, "-E", log],), daemon=True).start()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])

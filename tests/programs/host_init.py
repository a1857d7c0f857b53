"""Process 1 of an emulated host (tests/twohosts.py): host_init.py NAME SRV SSHD SSHD_CONFIG SSHD_LOG

Runs in fresh mount, pid, uts, ipc and net namespaces. Says `ready` when its file systems are there, starts sshd at
each line on stdin (the network is up by then), reaps whatever ends, and goes with the end of stdin: with it
the kernel ends every process of the host, also when the tests were killed.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path


def mount(*arguments: str) -> None:
    """Mount something for this host alone."""
    subprocess.run(["mount", *arguments], check=True)


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

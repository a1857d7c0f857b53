"""A real sshd on loopback with keys, configuration and known hosts of its own, and a proxy that delays and cuts."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
REMOTE_COMMAND = f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m gpuckpt"
"""How the gpuckpt under test is started on the far side."""

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:" + os.environ.get("PATH", ""))


def ssh_keygen(*arguments: object) -> str:
    """Run ssh-keygen."""
    argv = ["ssh-keygen", *map(str, arguments)]
    return subprocess.run(argv, check=True, timeout=30, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Sshd:
    """Hosts for ssh -F `config`: `far` (a shell), `bare` (SFTP and nothing else), both through `port` or `bare_port`."""

    def __init__(self, directory: Path, environment: str = "PATH=/usr/bin:/bin") -> None:
        """`environment`: what its programs find, as sshd_config has it."""
        self.directory = directory
        self.port, self.bare_port = free_port(), free_port()
        self.config = directory / "ssh_config"
        self.known_hosts = directory / "known_hosts"
        for name in ("host_key", "id", "authority"):
            ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", directory / name)
        ssh_keygen(
            "-q", "-s", directory / "authority", "-I", "far", "-h", "-n", "127.0.0.1", directory / "host_key.pub"
        )
        self.host_key = " ".join((directory / "host_key.pub").read_text().split()[:2])
        (directory / "authorized_keys").write_text((directory / "id.pub").read_text())
        (directory / "sshd_config").write_text(
            f"Port {self.port}\nPort {self.bare_port}\nListenAddress 127.0.0.1\nListenAddress ::1\n"
            f"HostKey {directory}/host_key\nHostCertificate {directory}/host_key-cert.pub\nAuthorizedKeysFile {directory}/authorized_keys\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            f"TrustedUserCAKeys {directory}/authority.pub\nStrictModes no\nUsePAM no\nPidFile none\nMaxStartups 100\nSubsystem sftp internal-sftp\n"
            f"SetEnv {environment}\nMatch LocalPort {self.bare_port}\n    ForceCommand internal-sftp\n"
        )
        self.know(self.port, self.bare_port)
        self.write_config({"far": self.port, "bare": self.bare_port})
        # sshd wants its empty directory even where it is not used (--with-privsep-path of the distribution).
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.child = self._start()

    def know(self, *ports: int) -> None:
        """The known hosts: this one, under these ports."""
        lines = [f"[{name}]:{port} {self.host_key}\n" for port in ports for name in ("127.0.0.1", "::1")]
        self.known_hosts.write_text("".join(lines))

    def write_config(self, ports: dict[str, int], more: str = "", path: Path | None = None) -> Path:
        """A configuration for ssh with these hosts."""
        text = "".join(f"Host {name}\n    HostName 127.0.0.1\n    Port {port}\n" for name, port in ports.items())
        path = path or self.config
        path.write_text(
            f"{text}Host *\n{more}    User {os.environ.get('USER', 'root') if os.geteuid() else 'root'}\n"
            f"    IdentityFile {self.directory}/id\n    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {self.known_hosts}\n    GlobalKnownHostsFile /dev/null\n"
        )
        return path

    def _start(self) -> subprocess.Popen:
        argv = [SSHD, "-D", "-f", self.directory / "sshd_config", "-E", self.directory / "sshd.log"]
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.bare_port), 1):
                return child
            assert child.poll() is None, (self.directory / "sshd.log").read_text()
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.02)

    def stop(self) -> None:
        """End the listener; sessions end with their connections."""
        self.child.terminate()
        self.child.wait(30)


class Proxy:
    """Forwards a port to another one; `cut_after` bytes towards the target all its connections break, once."""

    def __init__(self, target: int, *, cut_after: int | None = None, delay: float = 0.0, silent: bool = False) -> None:
        self._target, self._delay = target, delay
        self.cut_after = cut_after
        self.silent_from: int | None = 0 if silent else None
        self.passed = 0
        self.cuts = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._all: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._begin(self._accept)

    def _begin(self, act, *arguments) -> None:
        self._threads.append(threading.Thread(target=act, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            with self._lock:
                self._open += [near, far]
                self._all += [near, far]
            self._begin(self._forward, near, far, True)
            self._begin(self._forward, far, near, False)

    def _forward(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                if self._delay:
                    time.sleep(self._delay)
                if counted and not self._may_pass(len(content)):
                    return
                if self.silent_from is None or self.passed < self.silent_from:
                    sink.sendall(content)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _may_pass(self, count: int) -> bool:
        with self._lock:
            self.passed += count
            if self.cut_after is None or self.passed < self.cut_after:
                return True
            self.cut_after = None
        self.cut()
        return False

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            self.cuts += 1
            ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def go_down(self) -> None:
        """Break all, and refuse connections until `come_up`."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def come_up(self) -> None:
        """Listen again on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._begin(self._accept)

    def close(self) -> None:
        """Break all, and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for end in (self._listener, *self._all):
            end.close()

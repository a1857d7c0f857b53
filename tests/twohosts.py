"""Two hosts on this machine: `a` and `b` with mount, pid, uts, ipc and net namespaces and an sshd each, and a link.

Each has a /srv, /run and /dev/shm of its own; everything else of the file system they share. A program that is
started on one of them is a child of its process 1, as a daemon is.

`FarHost` is one host alone, for a job that moves off this machine itself, as one with a real GPU does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.harness import PROGRAMS, Answer
from tests.sshd import REMOTE_COMMAND, SSHD, ssh_keygen

DELAY_MS, LOSS_PERCENT = 10, 0.5
SPACES = ("--mount", "--pid", "--uts", "--ipc", "--net")
PASSED_ON = ("GPUCKPT_CRIU", "LD_LIBRARY_PATH", "FAKEGPU_DIR")


class Host:
    """One of them. `outside` is where the tests find its files."""

    def __init__(self, name: str, address: str, directory: Path, key: Path, first_pid: int) -> None:
        self.name, self.address, self.directory = name, address, directory
        self.srv = directory / "srv"
        self.srv.mkdir(parents=True)
        self._log = directory / "sshd.log"
        ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", directory / "host_key")
        (directory / "sshd_config").write_text(
            f"Port 22\nListenAddress {address}\nHostKey {directory}/host_key\nAuthorizedKeysFile {key}.pub\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            "StrictModes no\nUsePAM no\nPidFile /run/sshd.pid\nMaxStartups 100\nSubsystem sftp internal-sftp\n"
            "SetEnv PATH=/usr/bin:/bin\n"
        )
        self._space = subprocess.Popen(
            ["unshare", *SPACES, "--fork", "--mount-proc", "--kill-child", "--",
             sys.executable, PROGRAMS / "host_init.py", name, self.srv, SSHD, directory / "sshd_config", self._log],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._space.stdout.readline() == b"ready\n", f"host {name} did not come up"
        self.init = int(Path(f"/proc/{self._space.pid}/task/{self._space.pid}/children").read_text())
        """Its process 1, as the tests know it."""
        # The same number on both hosts would be taken on the other one.
        self.run("sh", "-c", f"echo {first_pid} > /proc/sys/kernel/ns_last_pid")

    def begin(self) -> None:
        """Start sshd: the network is there."""
        before = self._times_listening()
        self._space.stdin.write(b"\n")
        self._space.stdin.flush()
        harness.wait_for(lambda: self._times_listening() > before, "sshd listens")

    def _times_listening(self) -> int:
        return self._log.read_text().count("Server listening") if self._log.exists() else 0

    def kill_sshd(self) -> None:
        """SIGKILL to the sshd that listens and to all that serve; `begin` starts another one."""
        for pid, argv in self._processes():
            if b"sshd" in argv[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def host_key(self) -> str:
        """As in known_hosts."""
        return " ".join((self.directory / "host_key.pub").read_text().split()[:2])

    def outside(self, path: str) -> Path:
        """Where one of its files lies for the tests."""
        return Path(f"/proc/{self.init}/root{path}")

    def _within(self, *argv: object) -> list[str]:
        return ["nsenter", f"--target={self.init}", *SPACES, "--", *map(str, argv)]

    def run(self, *argv: object, check: bool = True, timeout: float = 60.0, **popen) -> subprocess.CompletedProcess:
        """Run a program there to its end."""
        popen = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, **popen}
        done = subprocess.run(self._within(*argv), timeout=timeout, **popen)
        assert not check or done.returncode == 0, (argv, done.stdout, done.stderr)
        return done

    def start(self, *argv: object, **popen) -> subprocess.Popen:
        """Start a program there, a child of the tests. `signal` reaches it; its Popen is that of nsenter."""
        defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self._within(*argv), **{**defaults, **popen})

    def pid_of(self, started: subprocess.Popen) -> int:
        """The program behind `start`, by its pid outside."""
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        return int(harness.wait_for(lambda: children.read_text().split(), "nsenter starts it")[0])

    def signal(self, started: subprocess.Popen, number: int) -> None:
        """Send a signal to a program that `start` started."""
        os.kill(self.pid_of(started), number)

    def gpuckpt(self, *arguments: object, timeout: float = 120.0) -> Answer:
        """Run gpuckpt there with --json to its end."""
        done = self.run(*self._gpuckpt(*arguments), check=False, timeout=timeout)
        assert done.stdout.startswith("{"), (done.returncode, done.stdout, done.stderr)
        return Answer(done.returncode, json.loads(done.stdout), done.stderr)

    def start_gpuckpt(self, *arguments: object, **popen) -> subprocess.Popen:
        """Start gpuckpt there with --json and do not wait; `signal` reaches it."""
        return self.start(*self._gpuckpt(*arguments), **popen)

    @staticmethod
    def _gpuckpt(*arguments: object) -> list[object]:
        root = PROGRAMS.parents[1]
        return ["env", f"PYTHONPATH={root}", sys.executable, "-m", "gpuckpt", *arguments, "--json"]

    def daemon(self, *argv: object) -> int:
        """Start a program as a daemon of this host, nothing on its standard streams; returns its pid there."""
        pid_file = self.srv / f"pid-{len(list(self.srv.iterdir()))}"
        script = 'echo $$ > "$0.new"; mv "$0.new" "$0"; exec "$@" </dev/null >/dev/null 2>&1'
        self.run("setsid", "--fork", "sh", "-c", script, f"/srv/{pid_file.name}", *argv, capture_output=False)
        harness.wait_for(pid_file.exists, f"{argv[0]} starts on {self.name}")
        return int(pid_file.read_text())

    def python(self, program: str, *arguments: object) -> int:
        """Start tests/programs/PROGRAM there as a daemon; returns its pid there."""
        return self.daemon(sys.executable, PROGRAMS / program, *arguments)

    def alive(self, pid: int) -> bool:
        """A process of this host, by its pid there, exists and is no zombie."""
        seen = self.run("cat", f"/proc/{pid}/stat", check=False).stdout.rpartition(")")[2].split()
        return bool(seen) and seen[0] not in "ZX"

    def serving(self) -> list[int]:
        """Far sides of gpuckpt that run there, by their pids outside."""
        return [pid for pid, argv in self._processes() if argv[-2:] == [b"gpuckpt", b"serve"]]

    def sessions(self) -> list[int]:
        """The sshd processes there that serve a connection, by their pids outside; not the one that listens."""
        listener = Path(f"/proc/{self.init}/root/run/sshd.pid").read_text().strip()
        found = [pid for pid, argv in self._processes() if b"sshd" in argv[0]]
        return [pid for pid in found if _inner_pid(pid) != listener]

    def pids(self) -> list[tuple[int, int]]:
        """Its processes: each one's pid outside, and the one it has there."""
        return [(pid, int(_inner_pid(pid) or 0)) for pid, _ in self._processes()]

    def _processes(self) -> list[tuple[int, list[bytes]]]:
        space, found = os.readlink(f"/proc/{self.init}/ns/pid"), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if os.readlink(entry / "ns/pid") == space and argv[0]:
                    found.append((int(entry.name), argv))
        return found

    def link(self, state: str) -> None:
        """Take this end of the link `down`, or put it `up` again."""
        self.run("ip", "link", "set", "eth0", state)

    def worsen_link(self) -> str:
        """Delay and lose packets on the way out: by netem, else with a short queue in front of a narrow link."""
        netem = ["netem", "delay", f"{DELAY_MS}ms", "loss", f"{LOSS_PERCENT}%"]
        if not self.run("tc", "qdisc", "add", "dev", "eth0", "root", *netem, check=False).returncode:
            return "netem"
        self.run(
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            *(["tbf", "rate", "200mbit", "burst", "64kb", "limit", "192kb"]),
        )
        return "tbf"

    def end(self) -> None:
        """Switch it off, and all that runs there."""
        self._space.stdin.close()
        self._space.wait(30)
        self._space.stdout.close()


def _inner_pid(pid: int) -> str:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("NSpid:")).split()[-1]
    return ""


class TwoHosts:
    """Both, and how each reaches the other: `ssh -F config b` on a."""

    def __init__(self, directory: Path) -> None:
        self.key, self.config = directory / "id", directory / "ssh_config"
        ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", self.key)
        self.hosts: list[Host] = []
        try:
            for number, name in enumerate(("a", "b"), 1):
                host = Host(name, f"10.99.0.{number}", directory / name, self.key, 3000 * number)
                self.hosts.append(host)
            self.a, self.b = self.hosts
            self._connect()
        except BaseException:
            self.end()
            raise

    def _connect(self) -> None:
        self.a.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        subprocess.run(
            ["nsenter", f"--target={self.a.init}", "--net", "--",
             "ip", "link", "set", "eth1", "name", "eth0", "netns", str(self.b.init)], check=True, timeout=30
        )  # fmt: skip
        known = self.config.with_name("known_hosts")
        known.write_text("".join(f"{host.address} {host.host_key}\n" for host in self.hosts))
        self.config.write_text(
            "".join(f"Host {host.name}\n    HostName {host.address}\n" for host in self.hosts)
            + f"Host *\n    User root\n    IdentityFile {self.key}\n    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {known}\n    GlobalKnownHostsFile /dev/null\n"
        )
        for host in self.hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.link("up")
        for host in self.hosts:
            host.begin()

    @property
    def reach(self) -> tuple[object, ...]:
        """The options by which each gpuckpt reaches the other one."""
        return ("--ssh-config", self.config, "--remote-command", REMOTE_COMMAND)

    def end(self) -> None:
        """Switch both off."""
        for host in self.hosts:
            host.end()


class FarHost:
    """A host `b` beside this machine, whose GPUs it shares: `gpuckpt migrate --tree PID b, *reach`.

    There is no link: what calls it connects in its network, where CUDA's abstract sockets are free, and needs no veth.
    """

    def __init__(self, directory: Path, first_pid: int) -> None:
        self.key, self.config = directory / "id", directory / "ssh_config"
        ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", self.key)
        self.b = Host("b", "127.0.0.1", directory / "b", self.key, first_pid)
        self.config.with_name("known_hosts").write_text(f"b {self.b.host_key}\n")
        enter = [shutil.which("nsenter"), f"--net=/proc/{self.b.init}/ns/net", "--", sys.executable]
        connect = shlex.join(map(str, [*enter, PROGRAMS / "pass_connection.py", "127.0.0.1", 22]))
        self.config.write_text(
            f"Host b\n    ProxyCommand {connect}\n    ProxyUseFdpass yes\n    User root\n"
            f"    IdentityFile {self.key}\n    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {directory}/known_hosts\n    GlobalKnownHostsFile /dev/null\n"
        )
        self.b.begin()

    @property
    def reach(self) -> tuple[object, ...]:
        """The options by which gpuckpt here reaches the one there, which finds CRIU and the driver as this one does."""
        kept = [f"{name}={os.environ[name]}" for name in PASSED_ON if name in os.environ]
        return ("--ssh-config", self.config, "--remote-command", f"{shlex.join(['env', *kept])} {REMOTE_COMMAND}")


def missing(*more: str) -> str:
    """Why there can be no hosts here."""
    if os.geteuid() != 0:
        return "needs root"
    needed = ("unshare", "nsenter", "setsid", "mount", "ssh", "ssh-keygen", *more)
    programs = [name for name in needed if shutil.which(name) is None]
    return f"needs {', '.join(programs)}" if programs else "" if SSHD else "needs OpenSSH's sshd"


@pytest.fixture
def two_hosts(tmp_path_factory):
    """Two hosts of this test's own."""
    why = missing("ip", "tc")
    if why:
        pytest.skip(why)
    hosts = TwoHosts(tmp_path_factory.mktemp("hosts"))
    yield hosts
    hosts.end()


@pytest.fixture
def far_host(tmp_path_factory):
    """far_host(FIRST_PID): a host beside this machine. Its pids begin there, where no job of the test has its own."""
    why = missing()
    if why:
        pytest.skip(why)
    made: list[FarHost] = []

    def start(first_pid: int) -> FarHost:
        made.append(FarHost(tmp_path_factory.mktemp("far"), first_pid))
        return made[-1]

    yield start
    for one in made:
        one.b.end()

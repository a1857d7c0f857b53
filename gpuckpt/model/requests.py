"""What the person asked for: one frozen value per verb, made by cli/, read by flows/."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal

from gpuckpt.model.location import Location
from gpuckpt.model.records import dataclass
from gpuckpt.model.series import FULL_EVERY_SECONDS, Rules

NEW_NETWORK = "new"

TcpPolicy = Literal["refuse", "keep", "close"]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Command lines of the user that run before and after an operation."""

    before: str | None = None
    after: str | None = None
    timeout_seconds: float = 60.0
    """The longest that each may take."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """How a restored tree shows that it serves again: all that is given must say so."""

    command: str | None = None
    """A command line that ends with 0."""
    url: str | None = None
    """http or https, answered with 2xx or 3xx."""
    address: tuple[str, int] | None = None
    """Host and port that take a connection."""
    timeout_seconds: float = 60.0
    cold_start_seconds: float | None = None
    """What a start from nothing takes, to be compared with."""

    @property
    def asked_for(self) -> bool:
        """Something is probed."""
        return any(probe is not None for probe in (self.command, self.url, self.address))


@dataclass(frozen=True, slots=True)
class Into:
    """The series that a dump goes into."""

    directory: Path
    name: str | None = None
    """None: by the program and its pid."""
    rules: Rules = field(default_factory=Rules)
    """Which images stay."""
    use_base: bool = True
    """The newest image is the base of the next."""
    full_every_seconds: float = FULL_EVERY_SECONDS
    """How old the last image that shares nothing with older ones may be."""
    push: Reach | None = None
    """The directory of another host where a copy of each image shall be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRequest:
    """The tree of `pid` shall be saved: what a dump and a migration ask in the same words."""

    pid: int
    """0 until `pid_file` or `unit` has been asked."""
    pid_file: Path | None = None
    """Instead of `pid`: the file that holds it."""
    unit: str | None = None
    """Instead of `pid`: the systemd unit whose main process it is."""
    tcp: TcpPolicy = "refuse"
    dry_run: bool = False
    allow: frozenset[str] = frozenset()
    keep_argv: bool = False
    timeout_seconds: float | None = None
    """Of a migration: until `go` is sent; after that nothing is broken off."""
    lock_timeout_seconds: float = 60.0
    """The longest wait for the job's own GPU kernels, per process."""
    settle_seconds: float = 3.0
    """How long a tree that goes on is watched before it is called good."""
    force_program: bool = False
    """Use the cuda-checkpoint program although the driver offers the API (hidden; for tests)."""
    huge_pages: bool = False
    """Set the host to transparent huge pages while the GPU memory is copied."""
    level: int | None = -1
    """zstd's level for the pages; None stores them as they are."""
    workers: int | None = None
    """Threads that compress; None: as many as there are cores, within limits."""
    hooks: Hooks = Hooks()
    """Run on this host."""
    metrics_file: Path | None = None
    """Prometheus text about this run goes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRequest(TreeRequest):
    """Save the tree as the image directory `image`."""

    image: Path
    """With `into` its directory, until the image has a name."""
    leave_running: bool = False
    plain: bool = False
    """Let CRIU write its files itself: no packs, no compression."""
    base: Path | None = None
    """An older image: what it holds already is shared with it, not written again."""
    capture_files: tuple[str, ...] = ()
    """'writable', 'all', 'none', absolute paths and patterns; empty: what is right for `leave_running`."""
    into: Into | None = None
    """Instead of `image`: the next image of a series."""
    capture_code: bool = True
    """Programs and libraries are among the files that can be captured."""
    encrypt_to: tuple[str, ...] = ()
    """Who can open the image: age or SSH recipients, or files of them. Empty: it is not encrypted."""
    identity: Path | None = None
    """Opens an encrypted `base`: an age identity, or an SSH private key."""
    sign_key: Path | None = None
    """The OpenSSH key that signs the image: a private one, or a public one whose other half an agent has."""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Bring the tree of `image` back on this host."""

    image: Path
    wait: bool = False
    stdio: dict[int, Path] = field(default_factory=dict)
    """Descriptor 0, 1, 2 -> the file it shall go to."""
    tcp: Literal["keep", "close"] | None = None
    gpu_map: dict[str, str] = field(default_factory=dict)
    """Old GPU -> new GPU, each a UUID or an index as the user wrote it."""
    dry_run: bool = False
    allow: frozenset[str] = frozenset()
    timeout_seconds: float | None = None
    settle_seconds: float = 3.0
    force_program: bool = False
    plain: bool = False
    """Let CRIU restore all memory from files, as it does alone."""
    huge_pages: bool = False
    """As DumpRequest.huge_pages."""
    overwrite_files: bool = False
    """Captured files take the place of those that are here and differ."""
    truncate_files: bool = False
    """Files that only grew since the dump are cut to the size they had."""
    reach: Reach | None = None
    """The host that the image lies on; None: here. `image` is then where its small files lie, once they do."""
    hooks: Hooks = Hooks()
    readiness: Readiness = Readiness()
    metrics_file: Path | None = None
    """As DumpRequest.metrics_file."""
    isolate: frozenset[Literal["pid", "net"]] = frozenset()
    """Namespaces of the tree's own."""
    netns: str | None = None
    """NEW_NETWORK, or the name of a network namespace that the tree shall come up in."""
    ports: dict[int, int] = field(default_factory=dict)
    """Port that the tree is bound to -> port that it shall have instead."""
    clone: bool = False
    """One of several from this image: its own pids, its own /dev/shm, and no file of others is changed."""

    @property
    def own_pids(self) -> bool:
        """The tree gets a pid namespace."""
        return self.clone or "pid" in self.isolate

    @property
    def own_network(self) -> bool:
        """The tree comes up in another network namespace than ours."""
        return self.netns is not None or "net" in self.isolate

    @property
    def named_network(self) -> str | None:
        """The network namespace of that name is meant; None: ours, or a new one."""
        return None if self.netns == NEW_NETWORK else self.netns

    allowed_signers: Path | None = None
    """Only images that one of these has signed are restored (OpenSSH's allowed_signers)."""
    identity: Path | None = None
    """Opens an encrypted image: an age identity, or an SSH private key."""
    identity_at_hand: bool = False
    """Nobody named it for this image: one that is not encrypted does without."""

    @property
    def name(self) -> str:
        """The image, as it is called in words."""
        return str(self.reach.location if self.reach is not None else self.image)


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """Repair the tree of `pid`, which an interrupted run left held."""

    pid: int
    timeout_seconds: float | None = None
    dry_run: bool = False
    force_program: bool = False


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """Say what a target is: an image, a running tree (`pid`), or this host (neither)."""

    target: Path | None = None
    pid: int | None = None
    verify: bool = False
    keep_argv: bool = False
    extract: Path | None = None
    """Write a plain CRIU image directory here."""
    remote: Reach | None = None
    """The host, or the image on it, that is looked at instead of this one."""
    memory: bool = False
    """Look at what the memory of the image consists of, too."""
    diff: Path | None = None
    """Another image, which this one is compared with."""
    against: Reach | None = None
    """The host whose ability to restore the image is judged instead of this one's."""
    allowed_signers: Path | None = None
    """As RestoreRequest.allowed_signers."""
    identity: Path | None = None
    """As RestoreRequest.identity."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How another host is reached."""

    location: Location
    ssh_config: Path | None = None
    """A file for ssh's -F, instead of the user's own."""
    remote_command: str | None = None
    """How gpuckpt is started there; None: as `gpuckpt`, without one over SFTP; 'internal-sftp': SFTP alone."""
    may_ask: bool = False
    """A person sits at a terminal."""
    connections: int | None = None
    """None: by cores, latency and size."""
    bytes_per_second: float | None = None
    stall_seconds: float = 60.0
    """After this silence a connection counts as lost."""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Copy `image` into the directory `reach.location` of another host."""

    image: Path
    reach: Reach
    verify_only: bool = False
    """Send nothing: say whether the copy there is whole."""
    delete_source: bool = False
    """Remove `image` once the copy there is verified."""
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Copy the image `reach.location` of another host into `directory`."""

    reach: Reach
    directory: Path
    verify_only: bool = False
    timeout_seconds: float | None = None
    allowed_signers: Path | None = None
    """As RestoreRequest.allowed_signers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateRequest(TreeRequest):
    """Move the tree to the host of `reach`, whose path is where the image stays there ('': it goes again)."""

    reach: Reach
    keep_image: Path | None = None
    """The image stays here, too, as this directory."""
    stdio: dict[int, str] = field(default_factory=dict)
    """Descriptor 0, 1, 2 -> the file it shall go to, on the other host."""
    gpu_map: dict[str, str] = field(default_factory=dict)
    pre_seed: bool = False
    """First an image of the running tree is made and sent: the real one then sends only what has changed since."""
    carry_files: tuple[str, ...] = ("writable",)
    """As DumpRequest.capture_files: of what the tree has open, what goes along."""
    hooks_there: Hooks = Hooks()
    """Around the restore, run on the other host."""
    readiness: Readiness = Readiness()
    """Probed on the other host."""

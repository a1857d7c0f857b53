"""Failures of the host, of CRIU itself, and around processes and cgroups."""

from __future__ import annotations

from gpuckpt.system.criu_causes.row import Row, row

_OTHER_CGROUP = (
    "restore without --wait (the tree then gets a cgroup of its own), or start gpuckpt in another cgroup, "
    "for example with systemd-run"
)
_NEWER_CRIU = "install CRIU 4.2 or newer on this host"

HOST: tuple[Row, ...] = (
    row(
        "not-root",
        r"CRIU needs to have the CAP_SYS_ADMIN",
        "CRIU lacks privileges",
        "run as root",
    ),
    row(
        "unknown-option",
        r"(?:unrecognized|unknown) option|invalid option --",
        "this CRIU does not know an option that gpuckpt passes: it is too old",
        _NEWER_CRIU,
    ),
    row(
        "log-not-writable",
        r"Can't create log file (?P<path>.+?): (?P<reason>.+)",
        "CRIU cannot write its log {path}: {reason}",
        "make that directory writable",
    ),
    row(
        "no-streamer",
        r"Unable to connect to image streamer socket",
        "nothing listened on the socket CRIU streams the image to",
        "run the command again; if it stays, report it as a bug of gpuckpt",
    ),
    row(
        "no-directory",
        r"(?:Can't open dir (?P<path>[^:]+)|Couldn't open image dir)",
        "the image directory {path} cannot be opened",
        "look whether that directory is there, and repeat the command",
    ),
    row(
        "socket-options",  # criu#2718
        r"sockets: Can't get 1:(?:16|34) opt: Operation not supported",
        "this CRIU is too old for this kernel: below 4.2 it cannot save any network socket on Linux 6.16 or newer",
        _NEWER_CRIU,
    ),
    row(
        "vdso-bounds",  # criu#2532
        r"vdso: Unexpected rt vDSO area bounds|Failed to fill self vdso symtable",
        "this CRIU is too old for this kernel",
        _NEWER_CRIU,
    ),
    row(
        "vdso-magic",
        r"vdso: ELF header magic mismatch",
        "the image was made by a newer CRIU than the one here",
        "install the CRIU version of the source host, or a newer one",
    ),
    row(
        "kernel-features",
        r"Could not initialize kernel features detection",
        "CRIU cannot find out what this kernel offers: it is too old for it, or lacks rights",
        "run `criu check` as root and follow its first error",
    ),
    row(
        "rseq",  # criu#1696
        r"has rseq but kernel lacks get_rseq_conf",
        "the job uses restartable sequences (glibc 2.35 or newer), which this kernel does not let CRIU read",
        "use Linux 5.13 or newer and CRIU 3.17 or newer",
    ),
    row(
        "track-memory",
        r"Tracking memory is not available|BUG at criu/mem\.c",
        "this kernel does not track written pages (soft-dirty)",
        "report it as a bug: gpuckpt asks for no memory tracking; another kernel or CRIU may do",
    ),
    row(
        "plugin-missing",
        r"Missing required plugin: (?P<plugin>\S+)",
        "the image was made with CRIU's plugin {plugin}, which is not loaded here",
        "restore it with CRIU itself on a host that has the plugin",
    ),
    row(
        "lsm",  # criu#1267
        r"mismatched lsm types|can't write lsm profile|lsm: err scanfing",
        "AppArmor or SELinux differs between the two hosts, or the job's profile is not loaded here",
        "use the same security module and profiles on both hosts",
    ),
)

PROCESSES: tuple[Row, ...] = (
    row(
        "inside-the-tree",
        r"The criu itself is within dumped tree",
        "gpuckpt runs inside the tree it shall dump",
        "run it from another session, or from cron",
    ),
    row(
        "unfreezable",
        r"Timeout reached\. Try to interrupt|Unseizable non-zombie \d+ found, state [A-Z]",
        "process {pid} cannot be stopped: state {state} (D: it waits for a device or a file server)",
        "wait until it goes on, or repair the storage it waits for; then try again",
        also=r"Unseizable non-zombie (?P<pid>\d+) found, state (?P<state>[A-Z])",
    ),
    row(
        "freeze-timeout",
        r"Timeout reached\. Try to interrupt",
        "the tree could not be stopped in time",
        "try again when the host is less busy: the longer a process waits for a device, the later it stops",
    ),
    row(
        "no-process",
        r"Failed to open \S+/(?P<pid>\d+)/comm",
        "there is no process {pid}",
        "it ended meanwhile: name a process that runs (`ps -e` lists them)",
    ),
    row(
        "traced",  # criu#2443
        r"Unable to interrupt task: (?P<pid>\d+) \(Operation not permitted\)",
        "process {pid} is being traced (gdb, strace)",
        "end the tracer, then try again",
        also=r"Unable to detach from \d+",
    ),
    row(
        "pid-taken",  # criu#2779
        r"Can't fork for (?P<pid>\d+): File exists",
        "process id {pid} is in use here: by a process, a zombie, or as a session or group id",
        "end what has it, or wait: a zombie goes when its parent reaps it; then repeat the command",
    ),
    row(
        "pid-race",
        r"Pid (?P<pid>\d+) do not match expected|Thread pid mismatch",
        "another process took the id that the job needs, just then",
        "try again; Linux 5.5 and newer do not have this race",
    ),
    row(
        "cpu",  # criu#2104
        r"CPU instruction capabilities do not match|CPU xfeatures has unsupported bits|FPU feature required by image",
        "this CPU lacks features of the CPU the image was made on",
        "restore on a host with the same or a newer CPU",
    ),
    row(
        "cpuset",  # criu#1524
        r"cg: .*No space left on device",
        "the job's cpuset cgroup has no CPUs here (this is not about a full disk)",
        _OTHER_CGROUP,
    ),
    row(
        "cgroup",
        r"Can't move .* into .*cgroup\.procs|cg: .*Can't move .* into ",
        "the job's cgroup does not exist here, or may not be used",
        _OTHER_CGROUP,
    ),
    row(
        "pidfile",
        r"pidfile: Can't open|Can't write pidfile",
        "CRIU cannot write the pid file",
        "make /run writable, with room: gpuckpt lets CRIU write it there",
    ),
)

"""What a job has that CRIU cannot save: GPU, kernel objects, terminals, sockets."""

from __future__ import annotations

from gpuckpt.system.criu_causes.row import Row, row

_IO_URING = "run `sysctl kernel.io_uring_disabled=2` and start the job again"
_SUSPEND_ALL = "every process with a GPU device open must use CUDA itself: start workers with spawn, not fork"
_TCP = "dump with --tcp keep or --tcp close"

GPU: tuple[Row, ...] = (
    row(
        "cuda-timeout",  # https://github.com/NVIDIA/cuda-checkpoint/issues/26
        r"cuda_plugin: (?:PAUSE|CHECKPOINT)_DEVICES failed|Unable to read output of cuda-checkpoint",
        "suspending CUDA took longer than CRIU's time limit",
        "run `gpuckpt restore --tree PID`, which resumes the job; then dump again with a longer --lock-timeout",
        also=r"Timeout reached|Interrupted system call",
    ),
    row(
        "cuda-still-locked",
        r"Failed to unlock process status .*may hang",
        "the job was left with CUDA locked: its next CUDA call waits for ever",
        "resume it now: gpuckpt restore --tree PID",
    ),
    row(
        "cuda-not-resumed",
        r"RESUME_DEVICES (?:RESTORE|UNLOCK) failed with (?P<reason>.+)",
        "the driver could not put the GPU state back: {reason}",
        "free memory on the same GPUs, then restore again",
    ),
    row(
        "cuda-program",
        r"cuda_plugin: check that cuda-checkpoint is present in \$PATH|--action flag not supported",
        "CRIU's CUDA plugin switched itself off: it found no usable cuda-checkpoint program",
        "use a driver of 555 or newer (570 for PyTorch)",
    ),
    row(
        "gpu-device-open",  # https://github.com/NVIDIA/cuda-checkpoint/issues/7
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \(chr (?:195:|\d+:\d+ \S*nvidia)",
        "a GPU device is still open (file {fd}): CUDA of that process was not suspended, or a forked child holds it",
        _SUSPEND_ALL,
    ),
    row(
        "device-mapped",
        r"handle_device_vma plugin failed|Can't handle non-regular mapping",
        "device memory is mapped, usually a GPU's: CUDA of that process was not suspended",
        _SUSPEND_ALL,
    ),
)

OBJECTS: tuple[Row, ...] = (
    row(
        "device-open",
        r"Can't dump file (?P<fd>\d+) of that type .*\(chr (?P<device>\d+:\d+(?: [^)]+)?)\)",
        "a device is open that CRIU cannot save: {device} (file {fd})",
        "let the job close it before the dump",
    ),
    row(
        "kernel-object",
        r"Can't dump file (?P<fd>\d+) .*anon_inode:\[?(?P<kind>[\w-]+)",
        "the job uses a kernel object that CRIU cannot save: {kind} (file {fd})",
        "start the job without that feature",
    ),
    row(
        "io-uring-mapped",  # criu#2131
        r"Unknown shit .*io_uring",
        "the job uses io_uring, which CRIU cannot save",
        _IO_URING,
    ),
    row(
        "io-uring-open",
        r"send_fds failed \(-22\)",
        "a process has a descriptor that cannot be passed on: nearly always io_uring, which CRIU cannot save",
        _IO_URING,
    ),
    row(
        "secret-memory",
        r"Unknown shit .*\(/secretmem",
        "the job uses secret memory (memfd_secret), which CRIU cannot save",
        "start the job without that feature",
    ),
    row(
        "special-mapping",
        r"Unknown shit \S+ \((?P<kind>[^)]*)",
        "the job has a mapping that CRIU cannot save: {kind}",
        "start the job without it",
    ),
    row(
        "tun",
        r"tun: Net namespace is required",
        "a tun or tap network device is open",
        "let the job close it before the dump",
    ),
    row(
        "socket-family",
        r"BUG! Unknown socket collected \(family (?P<family>\d+)\)",
        "the job has a socket of family {family}, which CRIU cannot save (40 is vsock)",
        "let the job close it before the dump",
    ),
    row(
        "watch",  # criu#2854
        r"fsnotify: .*Can't dump that handle",
        "the job watches a file of procfs, on an overlay, or a deleted one (inotify, fanotify)",
        "let the job close the watch before the dump",
    ),
)

TERMINAL: tuple[Row, ...] = (
    row(
        "terminal",
        r"tty: Found slave peer index \d+ without correspond master",
        "the job has a terminal whose other end lies outside its tree",
        "start jobs with setsid and their output in a file: setsid JOB </dev/null >>log 2>&1",
    ),
    row(
        "other-terminal",
        r"ctty inheritance detected",
        "the job has the controlling terminal of another session",
        "start jobs with setsid and their output in a file: setsid JOB </dev/null >>log 2>&1",
    ),
    row(
        "session",
        r"The root process (?P<pid>\d+) is not a session leader",
        "the leader of the session of process {pid} lies outside the tree",
        "name the session's leader with --tree (`ps -o sid= -p {pid}` says which), or start the job with setsid",
    ),
    row(
        "no-terminal",
        r"tty: Don't have tty to inherit session from",
        "the job had a terminal and there is none here (cron, ssh -T)",
        "restore it with --wait, from a terminal that stays open (tmux, screen)",
    ),
)

SOCKETS: tuple[Row, ...] = (
    row(
        "unix-outside",
        r"External socket is used\. Consider using --ext-unix-sk",
        "a unix socket's other end lies outside the tree",
        "name the parent of both processes with --tree, or let the job close the connection",
    ),
    row(
        "unix-half",  # criu#796
        r"Can't dump half of stream unix connection(?:\. name: (?P<name>.*?); peer name: (?P<peer>.*))?",
        "a unix stream connection leads out of the tree (its end: {name}, the other end: {peer})",
        "name the parent of both processes with --tree, or let the job close the connection",
    ),
    row(
        "tcp-open",
        r"Connected TCP socket, consider using --tcp-established",
        "the job has an open TCP connection",
        _TCP,
    ),
    row(
        "tcp-in-image",
        r"Connected TCP socket in image",
        "the image holds open TCP connections and the restore was not told to take them",
        "restore with --tcp keep or --tcp close",
    ),
    row(
        "tcp-close-needed",
        r"Need to set the --tcp-close options",
        "the image was dumped with closed TCP connections and the restore was not told so",
        "restore with --tcp close",
    ),
    row(
        "no-iptables",
        r"Iptables configuration failed|execvp\(\"ip6?tables-restore\"|exited, status=127",
        "CRIU wanted iptables to hold the TCP connections, and there is none here",
        "install iptables, or load the kernel's nf_tables (`modprobe nf_tables`)",
    ),
    row(
        "tcp-address",
        r"Can't bind inet socket back: Cannot assign requested address|Can't connect inet socket back",
        "a TCP connection's address does not belong to this host, or its peer is gone",
        "move the address here first, or restore with --tcp close",
    ),
    row(
        "port-taken",
        r"Can't bind inet socket.*: Address already in use",
        "a port that the job listens on or uses is taken on this host",
        "stop what uses it (`ss -tnlp` shows it), then restore again",
    ),
)

"""criu_log against logs recorded from CRIU 4.2.1 (tests/data/criu-logs) and against single lines of other versions."""

import re
from pathlib import Path

import pytest

from gpuckpt.system import criu_causes, criu_log

DATA = Path(__file__).parents[1] / "data" / "criu-logs"
SUCCESSES = ("dump-ok", "dump-terminal-ok", "restore-ok", "restore-ghost-ok", "restore-missing-fdinfo")

# Recorded log -> exit status of that run, the row, and words its cause must hold.
RECORDED = {
    "dump-bad-option": (1, "unknown-option", "too old"),
    "dump-d-state": (1, "unfreezable", "process 9464 cannot be stopped: state D"),
    "dump-dev": (1, "device-open", "10:237 (file 3)"),
    "dump-full": (1, "disk-full", "full"),
    "dump-ghost": (1, "ghost", "/srv/job/ghost is still open and larger than the limit (2097152 bytes)"),
    "dump-inotify": (1, "watch", "watches"),
    "dump-io-uring-fd": (1, "io-uring-open", "io_uring"),
    "dump-io-uring-mapped": (1, "io-uring-mapped", "io_uring"),
    "dump-killed": (-9, "criu-killed", "killed from outside"),
    "dump-landlock": (1, "kernel-object", "landlock-ruleset (file 3)"),
    "dump-locks": (1, "locks", "locks"),
    "dump-no-image-dir": (1, "no-directory", "/srv/nowhere cannot be opened"),
    "dump-no-link-remap": (1, "link-remap-off", "/dev/shm/sem."),
    "dump-no-process": (1, "no-process", "there is no process 9214"),
    "dump-no-streamer": (1, "no-streamer", "nothing listened"),
    "dump-not-leader": (1, "session", "process 9080"),
    "dump-not-root": (1, "not-root", "lacks privileges (CRIU wrote no log)"),
    "dump-perf": (1, "kernel-object", "perf_event (file 3)"),
    "dump-read-only": (1, "log-not-writable", "/srv/job/ro/dump.log: Read-only file system (CRIU wrote no log)"),
    "dump-secretmem": (1, "secret-memory", "memfd_secret"),
    "dump-self": (1, "inside-the-tree", "inside the tree"),
    "dump-tcp": (1, "tcp-open", "open TCP connection"),
    "dump-tcp-no-iptables": (1, "no-iptables", "iptables"),
    "dump-terminal": (1, "terminal", "terminal"),
    "dump-traced": (1, "traced", "process 9190 is being traced"),
    "dump-track-mem": (1, "track-memory", "soft-dirty"),
    "dump-tun": (1, "tun", "tun"),
    "dump-unix": (1, "unix-outside", "unix socket"),
    "dump-unix-half": (1, "unix-half", "(its end: unnamed, the other end: /srv/job/sock)"),
    "dump-userfaultfd": (1, "kernel-object", "userfaultfd"),
    "dump-vsock": (1, "socket-family", "family 40"),
    "restore-bad-mode": (1, "mode-changed", "of /srv/job/data.bin are 100600 and were 100644"),
    "restore-bad-size": (1, "size-changed", "/srv/job/data.bin has 1800 bytes now and had 800"),
    "restore-changed-core": (1, "image-damaged", "/srv/job/img/core-10348.img"),
    "restore-cpu": (1, "cpu", "CPU"),
    "restore-cut-core": (1, "image-cut", "/srv/job/img/core-9960.img has only 945 of 1902 bytes"),
    "restore-cut-files": (1, "image-cut", "/srv/job/img/files.img has only 97 of 104 bytes"),
    "restore-cut-pages": (-9, "pages-hang", "memory pages"),
    "restore-cwd": (1, "directory-missing", "working directory /srv/job/e "),
    "restore-file-missing": (1, "file-missing", "/srv/job/data.bin cannot be opened here: No such file"),
    "restore-fpu": (1, "cpu", "CPU"),
    "restore-link-remap-gone": (1, "link-remap-gone", "/dev/shm/link_remap.10, the file behind /dev/shm/sem."),
    "restore-listen-taken": (1, "port-taken", "port"),
    "restore-magic": (1, "image-format", "another version"),
    "restore-missing-core": (1, "image-file-missing", "missing"),
    "restore-missing-files": (1, "crash", "died while it was built"),
    "restore-missing-fs": (1, "crash", "died while it was built"),
    "restore-missing-ids": (1, "ids-missing", "ids"),
    "restore-missing-inventory": (1, "image-file-missing", "missing"),
    "restore-missing-mm": (1, "crash", "died while it was built"),
    "restore-missing-pages": (1, "pages-missing", "memory pages"),
    "restore-missing-pstree": (-11, "criu-crashed", "CRIU itself crashed"),
    "restore-no-terminal": (1, "no-terminal", "terminal"),
    "restore-pid-taken": (1, "pid-taken", "process id 10901 is in use"),
    "restore-pidfile": (1, "pidfile", "pid file"),
    "restore-plugin": (1, "plugin-missing", "plugin cuda_plugin"),
    "restore-shell-job": (-9, "shell-job-hang", "--shell-job"),
    "restore-tcp-address": (1, "tcp-address", "address does not belong to this host"),
    "restore-tcp-close-flag": (1, "tcp-close-needed", "closed TCP connections"),
    "restore-tcp-flag": (1, "tcp-in-image", "open TCP connections"),
    "restore-version": (1, "image-format", "another version"),
}

# Lines of other versions, from CRIU's source or from reports: what cannot be provoked with 4.2.1 here.
LINES = [
    ("socket-options", "Error (criu/sockets.c:600): sockets: Can't get 1:16 opt: Operation not supported"),
    ("socket-options", "Error (criu/sockets.c:600): sockets: Can't get 1:34 opt: Operation not supported"),
    ("vdso-bounds", "Error (criu/vdso.c:100): vdso: Unexpected rt vDSO area bounds"),
    ("vdso-bounds", "Error (criu/vdso.c:661): vdso: Failed to fill self vdso symtable"),
    ("vdso-magic", "Error (criu/pie/util-vdso.c:84): vdso: ELF header magic mismatch"),
    ("kernel-features", "Error (criu/crtools.c:265): Could not initialize kernel features detection."),
    ("rseq", "Error (criu/cr-dump.c:1090): 812 has rseq but kernel lacks get_rseq_conf feature"),
    ("track-memory", "Error (criu/mem.c:66): BUG at criu/mem.c:66"),
    ("lsm", "Error (criu/lsm.c:340): mismatched lsm types and lsm profile specified"),
    ("lsm", "pie: 812: Error (criu/pie/restorer.c:162): can't write lsm profile -2"),
    ("lsm", "Error (criu/lsm.c:60): lsm: err scanfing"),
    ("cuda-still-locked", "Error (cuda_plugin.c:430): cuda_plugin: Failed to unlock process status x, may hang"),
    ("cuda-not-resumed", "Error (cuda_plugin.c:501): cuda_plugin: RESUME_DEVICES RESTORE failed with out of memory"),
    ("cuda-program", "Warn  (cuda_plugin.c:601): cuda_plugin: check that cuda-checkpoint is present in $PATH"),
    ("cuda-program", "Error (cuda_plugin.c:601): cuda_plugin: cuda-checkpoint --action flag not supported"),
    ("gpu-device-open", "Error (criu/files-ext.c:94): Can't dump file 7 of that type [20666] (chr 195:255)"),
    ("device-mapped", "Error (criu/proc_parse.c:640): handle_device_vma plugin failed: Operation not permitted"),
    ("device-mapped", "Error (criu/proc_parse.c:669): Can't handle non-regular mapping on 812's map 7f0"),
    ("special-mapping", "Error (criu/proc_parse.c:502): Unknown shit 100600 (/strange (deleted))"),
    ("other-terminal", "Error (criu/tty.c:1800): tty: ctty inheritance detected sid/pgrp 4 differs"),
    ("link-remap-stale", "Error (criu/files-reg.c:1200): Can't link remap to dev/shm/link_remap.4: File exists"),
    ("build-changed", "812: Error (criu/files-reg.c:2100): File usr/lib/libm.so.6 has bad build-ID"),
    ("no-iptables", 'Error (criu/util.c:640): execvp("iptables-restore", ...) failed: No such file or directory'),
    ("tcp-address", "812: Error (soccr/soccr.c:560): Can't connect inet socket back: Network is unreachable"),
    ("freeze-timeout", "Error (criu/cr-dump.c:1655): Timeout reached. Try to interrupt: 0"),
    ("pid-race", "Error (criu/cr-restore.c:1400): Pid 812 do not match expected 811"),
    ("pid-race", "Error (criu/pie/restorer.c:600): Thread pid mismatch 5/6"),
    ("cpu", "Error (criu/arch/x86/cpu.c:400): cpu: FPU feature required by image is not supported on host"),
    ("cpuset", "Error (criu/cgroup.c:900): cg: Can't write 812 to cgroup.procs: No space left on device"),
    ("cgroup", "Error (criu/cgroup.c:1200): cg: Can't move 812 into cpu/job/cgroup.procs (-1/2): No such file"),
    ("image-damaged", "Error (criu/image.c:700): Img trimmed 10/20"),
    ("pages-missing", "Error (criu/pagemap.c:400): Unexpected EOF reading pages data at offset 8192"),
    ("descriptors-missing", "Error (criu/files.c:1000): Empty list on file desc id 0x5(1)"),
    ("descriptors-missing", "Error (criu/files.c:1000): BUG at criu/files.c:1000"),
    ("image-format", "Error (criu/image.c:40): Too old image, no longer supported"),
    ("image-format", "Error (criu/image.c:555): Head magic doesn't match for core-5.img"),
    ("disk-full", "Error (criu/page-xfer.c:263): page-xfer: Unable to splice data: No space left on device"),
    ("disk-full", "Error (criu/page-xfer.c:263): page-xfer: Unable to spice data: No space left on device"),
    ("disk-full", "Error (criu/bfd.c:268): bfd: Error flushing image: No space left on device"),
    ("disk-full", "Error (criu/image.c:480): Can't write image core-5.img: No space left on device"),
    (
        "cuda-not-resumed",
        "Error (cuda_plugin.c:501): cuda_plugin: RESUME_DEVICES UNLOCK failed with initialization error",
    ),
    (
        "gpu-device-open",
        "Error (criu/files-ext.c:94): Can't dump file 7 of that type [20666] (chr 236:0 /dev/nvidia-uvm)",
    ),
    ("no-directory", "Error (criu/image.c:700): Couldn't open image dir"),
    ("plugin-missing", "Error (criu/image.c:120): Missing required plugin: cuda_plugin"),
    ("no-iptables", 'Error (criu/util.c:640): execvp("ip6tables-restore", ...) failed: No such file or directory'),
    ("no-iptables", "Error (criu/netfilter.c:90): netfilter: Iptables configuration failed: No such process"),
    ("no-iptables", "Error (criu/util.c:645): exited, status=127"),
    (
        "tcp-address",
        "812: Error (criu/sk-inet.c:990): inet: Can't bind inet socket back: Cannot assign requested address",
    ),
    ("unfreezable", "Error (criu/seize.c:800): Unseizable non-zombie 812 found, state D, err -1, PTRACE_SEIZE -1"),
    ("cpu", "Error (criu/arch/x86/cpu.c:300): cpu: CPU xfeatures has unsupported bits (0x60000)"),
    ("cpu", "Error (criu/arch/x86/cpu.c:390): cpu: CPU instruction capabilities do not match run time"),
    ("cgroup", "Error (criu/cgroup.c:700): cg: Can't move process into /cpu/job"),
    ("pidfile", "Error (criu/util.c:900): pidfile: Can't open /run/x/restored.pid: No such file or directory"),
    ("pidfile", "Error (criu/cr-restore.c:2400): Can't write pidfile"),
    ("image-damaged", "Error (criu/protobuf.c:72): Failed unpacking object 0x55 from /srv/img/core-5.img"),
    ("pages-missing", "812: Error (criu/pagemap.c:300): Can't read pages data (-9)"),
    ("ids-missing", "Error (criu/pstree.c:600): Images corrupted or too old criu was used for dump."),
    ("ids-missing", "Error (criu/pstree.c:610): No IDS for root task"),
    ("image-format", "Error (criu/image.c:50): Not supported images version 7"),
    ("directory-missing", "812: Error (criu/files.c:1400): Can't open cwd"),
    ("track-memory", "Error (criu/mem.c:60): Tracking memory is not available. Consider omitting --track-mem option."),
]

SAID = [
    ("unknown-option", "criu: unrecognized option '--no-such'"),
    ("unknown-option", "criu: unknown option -- z"),
    ("unknown-option", "criu: invalid option -- 'Z'"),
    ("not-root", "CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE capability:"),
]
"""What CRIU says on standard error, before it has a log."""

PAIRS = [
    (
        "cuda-timeout",
        "(10.1) Error (criu/cr-dump.c:1655): Timeout reached. Something else",
        "(10.2) Error (cuda_plugin.c:210): cuda_plugin: PAUSE_DEVICES failed with",
    ),
    (
        "cuda-timeout",
        "(10.1) Error (cuda_plugin.c:150): cuda_plugin: Unable to read output of cuda-checkpoint: Interrupted system call",
        "",
    ),
    (
        "cuda-timeout",
        "(10.1) Error (criu/cr-dump.c:1655): Timeout reached. Something else",
        "(10.2) Error (cuda_plugin.c:230): cuda_plugin: CHECKPOINT_DEVICES failed with",
    ),
]


def read(name):
    log = DATA / f"4.2.1-{name}.log"
    return criu_log.read_log(log), (DATA / f"4.2.1-{name}.out").read_text() if not log.exists() else ""


def explain_recorded(name):
    log, said = read(name)
    status = RECORDED[name][0] if name in RECORDED else 1
    return criu_log.explain(log, "", said, status)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_failures_are_explained(name):
    _, identity, words = RECORDED[name]
    found = explain_recorded(name)
    assert found.known
    assert (found.id, words in found.cause) == (identity, True), found
    assert found.remedy
    log, said = read(name)
    assert found.line in (log or said).replace("\t", " ")


def test_every_recorded_log_is_used():
    on_disk = {path.stem.removeprefix("4.2.1-") for path in DATA.iterdir() if path.suffix in (".log", ".out")}
    assert on_disk == set(RECORDED) | set(SUCCESSES) | {"restore-missing-pagemap"}


@pytest.mark.parametrize(("identity", "line"), LINES)
def test_lines_of_other_versions_are_explained(identity, line):
    log = f"(00.1) Version: 4.3\n(00.2) {line}\n(00.3) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
    found = criu_log.explain(log, "", "", 1)
    assert (found.id, found.known) == (identity, True)
    assert found.line.endswith(line.strip())


@pytest.mark.parametrize(("identity", "line"), SAID)
def test_what_is_said_without_a_log_is_explained(identity, line):
    assert criu_log.explain("", "", f"{line}\n", 1).id == identity


@pytest.mark.parametrize(("identity", "first", "second"), PAIRS)
def test_causes_that_take_two_lines(identity, first, second):
    assert criu_log.explain(f"{first}\n{second}\n", "", "", 1).id == identity


def test_every_row_is_reached_and_has_an_id_of_its_own():
    reached = (
        {explain_recorded(name).id for name in RECORDED} | {row for row, _ in LINES} | {row for row, _, _ in PAIRS}
    )
    rows = [*criu_causes.ROWS, *criu_causes.LAST_LINE_ROWS, criu_causes.CRASHED, criu_causes.KILLED]
    assert len({row.id for row in rows}) == len(rows)
    assert {row.id for row in rows} == reached


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between the `|` that stand in no bracket."""
    parts, depth = [""], 0
    for piece in re.findall(r"\\.|.", pattern):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


@pytest.mark.parametrize("row", criu_causes.ROWS, ids=lambda row: row.id)
def test_every_alternative_of_a_pattern_is_met_by_a_line(row):
    """Else one of them could be wrong, and its failure unexplained, without a test that says so."""
    recorded = (line for name in RECORDED for text in read(name) for line in text.splitlines())
    lines = [*recorded, *(line for _, line in LINES + SAID), *(line for _, *both in PAIRS for line in both)]
    for part in _alternatives(row.pattern.pattern):
        assert any(re.search(part, line) for line in lines), part


def test_every_placeholder_is_a_group_of_its_row():
    for row in (*criu_causes.ROWS, *criu_causes.LAST_LINE_ROWS):
        groups = set(row.pattern.groupindex) | set(row.also.groupindex if row.also else ())
        assert set(re.findall(r"\{(\w+)\}", row.cause + row.remedy)) <= groups, row.id


@pytest.mark.parametrize("name", SUCCESSES)
def test_successful_runs_explain_nothing(name):
    log, _ = read(name)
    assert criu_log.finished(log)
    assert "Error (" in log  # it has lines that look like a cause
    assert criu_log.error_lines(log) == ()
    assert not criu_log.explain(log, "", "", 1).known
    assert criu_log.explain(log, "", "", 0) == criu_log.Explanation("", "", "", known=False)


@pytest.mark.parametrize("name", [name for name in RECORDED if not name.startswith("dump-bad")])
def test_failures_are_not_finished(name):
    assert not criu_log.finished(read(name)[0])


def test_what_a_job_writes_does_not_finish_a_dump():
    assert not criu_log.finished("(00.1) Collected [x/(00.1) Dumping finished successfully] ID 1\n")
    assert not criu_log.finished("Dumping finished successfully\n")


def test_a_failure_without_a_reason_says_so_and_shows_the_end():
    found = explain_recorded("restore-missing-pagemap")
    assert not found.known
    assert "gave no reason" in found.cause
    assert found.line.endswith("Restoring FAILED.")
    many = "".join(f"(00.{i:03}) step {i}\n" for i in range(100))
    assert criu_log.explain(many, "", "", 1).line.splitlines() == many.splitlines()[-20:]


def test_an_unknown_error_is_quoted():
    found = criu_log.explain("(00.1) 7: Error (criu/x.c:1): Something new\n", "", "", 1)
    assert found == criu_log.Explanation(
        "CRIU says: Something new",
        "see CRIU's log for what came before",
        "(00.1) 7: Error (criu/x.c:1): Something new",
        known=False,
    )


def test_no_log_and_no_words():
    found = criu_log.explain("", "", "", 1)
    assert found.cause == "CRIU failed and gave no reason (CRIU wrote no log)"
    assert not found.known


def test_an_error_inside_a_process_beats_a_later_cannot():
    text = "Error (a.c:1): Can't do it\npie: 5: Error (b.c:2): the cause\nError (c.c:3): more\n"
    assert criu_log.error_lines(text)[0].endswith("the cause")
    other = "Error (a.c:1): It broke\npie: 5: Error (b.c:2): a consequence\n"
    assert criu_log.error_lines(other)[0].endswith("It broke")


def test_devices_are_named():
    log, _ = read("dump-dev")
    found = criu_log.explain(log, "", "", 1, device_name=lambda major, minor: f"/dev/loop-control.{major}.{minor}")
    assert "/dev/loop-control.10.237" in found.cause
    gpu = log.replace("chr 10:237", "chr 236:0")
    found = criu_log.explain(gpu, "", "", 1, device_name=lambda *_: "/dev/nvidia-uvm")
    assert found.id == "gpu-device-open"
    assert criu_log.explain(gpu, "", "", 1, device_name=lambda *_: None).id == "device-open"


def test_the_status_in_words():
    assert criu_log.status_words(134) == criu_log.status_words(-6)
    assert criu_log.status_words(139) == criu_log.status_words(-11) == "crashed"
    assert "SIGKILL" in criu_log.status_words(137)
    assert criu_log.status_words(-9) == criu_log.status_words(137)
    assert criu_log.status_words(77) == "ended with status 77"


@pytest.mark.parametrize("status", [137, -9, 143, 130, 129])
def test_a_killed_criu_is_said_to_be_killed(status):
    log, _ = read("dump-killed")
    assert criu_log.explain(log, "", "", status).id == "criu-killed"


@pytest.mark.parametrize("status", [134, 139, -6, -11])
def test_a_crashed_criu_is_said_to_have_crashed(status):
    log, _ = read("dump-killed")
    assert criu_log.explain(log, "", "", status).id == "criu-crashed"


def test_an_error_counts_more_than_the_signal():
    log, _ = read("dump-full")
    assert criu_log.explain(log, "", "", 137).id == "disk-full"


def test_run_id():
    log, _ = read("dump-ok")
    assert criu_log.run_id(log) == "f46e3fb2-4887-48fe-bcd4-735a62d2c087"
    assert criu_log.run_id(read("dump-not-root")[1]) == "fa9b0686-65f2-4934-a40e-c50922d859c4"
    assert criu_log.run_id("(00.1) Dump CRIU run id = 298597aa-6269-474b-a3c2-1e0052931a01\n") is None
    assert criu_log.run_id("") is None
    assert criu_log.run_id("x" * 5000 + "\nCRIU run id = 298597aa-6269-474b-a3c2-1e0052931a01\n") is None


def test_control_characters_do_not_reach_the_terminal():
    log = "(00.1) Error (criu/files-reg.c:1): Can't dump ghost file /a\x1b[2J\udcff of 5 size, increase limit\n"
    found = criu_log.explain(log, "", "", 1)
    assert "/a?[2J\udcff is still open" in found.cause
    assert "\x1b" not in found.line


def test_long_lines_and_values_are_bounded():
    log = f"(00.1) Error (criu/files-reg.c:1): Can't dump ghost file /{'a' * 900} of 5 size, increase limit\n"
    found = criu_log.explain(log, "", "", 1)
    assert found.id == "ghost"
    assert len(found.cause) < 400
    log = f"(00.1) Error (x.c:1): {'a' * 100_000}\n"
    assert len(criu_log.explain(log, "", "", 1).line) <= 1000


def test_braces_in_a_log_stay_what_they_are():
    log = "(00.1) Error (x): Can't dump ghost file /a{size}{0} of 5 size, increase limit\n"
    assert "/a{size}{0} is" in criu_log.explain(log, "", "", 1).cause


def test_a_huge_log_is_read_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(criu_log, "READ_BYTES", 1000)
    monkeypatch.setattr(criu_log, "_HEAD_BYTES", 800)
    path = tmp_path / "log"
    path.write_bytes(b"a" * 900 + b"b" * 5000 + b"c" * 150)
    text = criu_log.read_log(path)
    assert text == "a" * 800 + "\n[...]\n" + "b" * 50 + "c" * 150
    path.write_bytes(b"\xffd" * 500)
    assert criu_log.read_log(path) == "\udcffd" * 500
    assert criu_log.read_log(tmp_path / "none") == ""

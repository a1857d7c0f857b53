"""Checks of the processes that a dump would save: who they are and who watches over them."""

from __future__ import annotations

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed, unknown
from gpuckpt.checks.facts import DumpFacts
from gpuckpt.model.facts import Process
from gpuckpt.model.report import Severity

RESTARTS_AFTER_A_KILL = frozenset({"always", "on-failure", "on-abnormal", "on-abort"})
"""Values of systemd's Restart= that start the unit again when its main process is ended by a signal."""

# time: CRIU gives every restored tree a time namespace of its own, so that its clocks go on. cgroup: only a view.
UNIMPORTANT_NAMESPACES = frozenset({"time", "time_for_children", "cgroup", "pid_for_children"})

MADE_BY_US = (
    "this version saves no tree of --isolate pid or --clone: end it and restore its image, without these if it is to "
    "be saved again"
)
RUNTIME_COMMANDS = {
    "docker": "docker checkpoint create CONTAINER NAME",
    "podman": "podman container checkpoint CONTAINER",
    "containerd": "ctr -n NAMESPACE tasks checkpoint CONTAINER (Kubernetes: the kubelet's checkpoint call)",
    "cri-o": "crictl checkpoint --export FILE CONTAINER (Kubernetes: the kubelet's checkpoint call)",
    "runc": "runc checkpoint CONTAINER",
    "crun": "crun checkpoint CONTAINER",
    "lxc": "lxc-checkpoint -n CONTAINER -D DIRECTORY -s",
    "incus": "incus stop --stateful CONTAINER",
    "lxd": "lxc stop --stateful CONTAINER",
}


def named(process: Process) -> str:
    """'1234 python'."""
    return f"{process.pid} {process.comm}"


def _alive(facts: DumpFacts) -> Judgement:
    root = facts.tree.processes[0]
    if root.state not in ("Z", "X", "x"):
        return passed("a living process", f"{named(root)}, state {root.state}")
    hint = f"name a process that runs: this one has ended and waits for its parent {root.ppid} to take its exit status"
    return failed("a living process", f"{named(root)} has ended (zombie)", hint)


def _kernel_thread(facts: DumpFacts) -> Judgement:
    threads = [named(process) for process in facts.tree.processes if process.kernel_thread]
    hint = "name a user process: kernel threads have no memory of their own to save"
    return none_of(threads, expected="no kernel thread", hint=hint)


def _own_ancestor(facts: DumpFacts) -> Judgement:
    expected = "gpuckpt outside the tree that it saves"
    inside = facts.own_pid in facts.tree.pids or facts.tree.root.pid in facts.ancestors_of_gpuckpt
    if not inside:
        return passed(expected, "it is outside")
    hint = "start gpuckpt from another session, from cron or with systemd-run, or name a child process"
    return failed(expected, f"gpuckpt ({facts.own_pid}) was started inside the tree of {facts.tree.root.pid}", hint)


def _traced(facts: DumpFacts) -> Judgement:
    traced = []
    for process in facts.tree.processes:
        if process.tracer_pid:
            tracer = facts.tracers.get(process.tracer_pid, f"process {process.tracer_pid}")
            traced.append(f"{named(process)} is traced by {tracer}")
    hint = "end the tracer (gdb, strace ...) or let it detach, then repeat the command"
    return none_of(traced, expected="no process is traced", hint=hint)


def _foreign(facts: DumpFacts) -> Judgement | None:
    if facts.own_uid == 0 or facts.host.privileged:
        return None
    foreign = [f"{named(p)} belongs to uid {p.uid}" for p in facts.tree.processes if p.uid != facts.own_uid]
    return none_of(foreign, expected=f"processes of uid {facts.own_uid}", hint="run it as root: sudo gpuckpt ...")


def _uninterruptible(facts: DumpFacts) -> Judgement:
    waiting = [named(process) for process in facts.tree.processes if process.state == "D"]
    hint = "if it stays so, see what it waits for in /proc/PID/stack (mostly storage): it cannot be frozen until then"
    return none_of(waiting, expected="no process in uninterruptible sleep", hint=hint)


def _stopped(facts: DumpFacts) -> Judgement | None:
    stopped = [named(process) for process in facts.tree.processes if process.state == "T"]
    if not stopped:
        return None
    return failed(
        "no stopped process", listing(stopped), "nothing to do: they come back stopped; `kill -CONT PID` wakes"
    )


def _differing_namespaces(facts: DumpFacts) -> dict[str, list[str]]:
    """Kind of namespace -> the processes that are in another one than gpuckpt."""
    found: dict[str, list[str]] = {}
    for process in facts.tree.processes:
        for kind, value in process.namespaces.items():
            own = facts.own_namespaces.get(kind)
            if own is not None and value != own and kind not in UNIMPORTANT_NAMESPACES:
                found.setdefault(kind, []).append(named(process))
    return found


def _container(facts: DumpFacts) -> Judgement:
    around, differing = facts.tree.surroundings, _differing_namespaces(facts)
    expected = "processes of this host, or of the container that gpuckpt runs in"
    in_container = around.container_id is not None or around.container_runtime is not None
    if not differing or not (in_container or "pid" in differing):
        return passed(expected, "they are")
    runtime = around.container_runtime or "unknown"
    what = (
        f"container {around.container_id or '(no id)'} of {runtime}" if in_container else "a pid namespace of its own"
    )
    if runtime == "gpuckpt":
        return failed(
            expected, f"namespaces that `gpuckpt restore` has made: {', '.join(sorted(differing))}", MADE_BY_US
        )
    known = RUNTIME_COMMANDS.get(runtime.lower())
    hint = (
        f"a container is saved by its runtime: {known}"
        if known
        else "run gpuckpt inside that container, or use the checkpoint command of what started it"
    )
    return failed(expected, f"{what}; other namespaces: {', '.join(sorted(differing))}", hint)


def _namespaces(facts: DumpFacts) -> Judgement | None:
    differing = _differing_namespaces(facts)
    if _container(facts).verdict == "fail":
        return None
    found = [f"{kind}: {', '.join(pids)}" for kind, pids in sorted(differing.items())]
    hint = (
        "start the job without namespaces of its own (systemd: no PrivateTmp=, PrivateDevices=, PrivateNetwork=, "
        "PrivateUsers=, ProtectSystem=, ProtectHome=, ReadOnlyPaths=), or run gpuckpt inside them with nsenter"
    )
    if "net" in differing:
        hint += "; --allow does not save its network: after a restore nothing answers at its ports"
    return none_of(found, expected="the namespaces that gpuckpt is in", hint=hint, fine="the same")


def _foreground(facts: DumpFacts) -> Judgement | None:
    jobs = [named(process) for process in facts.tree.processes if process.foreground]
    if not jobs or not facts.uses_cuda:
        return None
    hint = (
        "start the job with `setsid JOB </dev/null >>LOG 2>&1`, or send it to the background (Ctrl-Z, bg): "
        "the GPU's hold stops a foreground job, and its shell then takes the terminal away"
    )
    severity: Severity = "block" if facts.request.leave_running else "warn"
    return failed("no foreground job of a terminal", listing(jobs), hint, severity)


def _supervisor(facts: DumpFacts) -> Judgement | None:
    around = facts.tree.surroundings
    if facts.request.leave_running or not (around.systemd_unit or around.slurm_job_id):
        return None
    expected = "nobody who starts the job again when it ends"
    restart = around.systemd_restart
    if around.systemd_unit and restart in RESTARTS_AFTER_A_KILL:
        hint = (
            f"set Restart=no first: `systemctl edit --runtime {around.systemd_unit}`, lines [Service] and Restart=no; "
            "else a second copy starts when the dump ends the unit's main process"
        )
        return failed(expected, f"{around.systemd_unit} has Restart={restart}", hint)
    if around.slurm_job_id:
        job = f"Slurm job {around.slurm_job_id}" + (f", step {around.slurm_step_id}" if around.slurm_step_id else "")
        hint = (
            f"`scontrol update JobId={around.slurm_job_id} Requeue=0` first; "
            "the step ends with the dump, as if killed by signal 9"
        )
        return failed(expected, job, hint)
    if restart is None and not str(around.systemd_unit).endswith(".scope"):
        hint = f"look at `systemctl show -p Restart {around.systemd_unit}`"
        return unknown(expected, f"{around.systemd_unit}, its Restart= is not known", hint)
    return passed(expected, f"{around.systemd_unit} has Restart={restart or 'no'}")


ALIVE: Check[DumpFacts] = Check("alive", "block", "the process has not ended", _alive, status=21, allowable=False)
KERNEL_THREAD: Check[DumpFacts] = Check(
    "kernel-thread", "block", "no process is a kernel thread", _kernel_thread, allowable=False
)
OWN_ANCESTOR: Check[DumpFacts] = Check(
    "own-ancestor", "block", "gpuckpt does not run inside the tree it saves", _own_ancestor, allowable=False
)
TRACED: Check[DumpFacts] = Check("traced", "block", "no debugger or tracer holds a process", _traced, allowable=False)
FOREIGN: Check[DumpFacts] = Check(
    "foreign", "block", "without root, all processes are one's own", _foreign, status=10, allowable=False
)
UNINTERRUPTIBLE: Check[DumpFacts] = Check(
    "uninterruptible", "note", "no process waits where it cannot be frozen", _uninterruptible
)
STOPPED: Check[DumpFacts] = Check("stopped", "note", "which processes are stopped and come back so", _stopped)
CONTAINER: Check[DumpFacts] = Check("container", "block", "the tree is no container's", _container)
NAMESPACES: Check[DumpFacts] = Check(
    "namespaces", "block", "the tree has no mount, network or other namespaces of its own", _namespaces
)
FOREGROUND: Check[DumpFacts] = Check("foreground", "warn", "no GPU job holds the foreground of a terminal", _foreground)
SUPERVISOR: Check[DumpFacts] = Check(
    "supervisor", "warn", "nobody starts a second copy when the tree ends", _supervisor
)

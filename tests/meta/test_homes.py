"""One home for each outside effect: the rules that ruff cannot see. A failure lists the offenders."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gpuckpt"


@dataclass(frozen=True)
class Rule:
    """What is looked for, where it is at home, and who is excused why."""

    name: str
    finds: Callable[[ast.AST], str | None]
    homes: tuple[str, ...]
    excused: tuple[tuple[str, str], ...] = ()
    """(file, reason)."""


def text_that_begins_with(*starts: str) -> Callable[[ast.AST], str | None]:
    def finds(node: ast.AST) -> str | None:
        found = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(starts)
        return node.value if found else None

    return finds


def attribute(*names: str) -> Callable[[ast.AST], str | None]:
    """module.attribute, as it is written."""

    def finds(node: ast.AST) -> str | None:
        if isinstance(node, ast.ImportFrom):
            written = [f"{node.module}.{alias.name}" for alias in node.names]
            return next((name for name in written if name in names), None)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            return name if name in names else None
        return None

    return finds


def imported(*modules: str) -> Callable[[ast.AST], str | None]:
    def finds(node: ast.AST) -> str | None:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        return next((name for name in names for module in modules if f"{name}.".startswith(f"{module}.")), None)

    return finds


RULES = (
    Rule(
        "/proc is read by system/procfs",
        text_that_begins_with("/proc"),
        ("system/procfs/",),
        (
            ("system/hostsettings.py", "settings below /proc/sys, which it writes as well"),
            ("checks/filechoice.py", "compares paths, reads nothing"),
            ("system/pidnames.py", "names for TAB, without the 0.1 s that loading system/procfs takes"),
            ("accelerators/nvidia.py", "the driver's version file, and whether a pid that NVML names still exists"),
            ("system/nsinit.py", "a program of its own, which mounts it and sets the pids of its namespace"),
        ),
    ),
    Rule("cgroups are written by system/", text_that_begins_with("/sys/fs/cgroup"), ("system/",)),
    Rule(
        "C libraries are loaded by accelerators/ and by system/, for calls that Python lacks",
        attribute("ctypes.CDLL", "ctypes.cdll", "ctypes.PyDLL", "ctypes.util"),
        ("accelerators/", "system/confinement.py", "system/syscallfilter.py", "system/files.py", "system/hold.py", "system/memory_io.py", "system/namespaces.py", "system/nsinit.py", "system/procfs/", "system/userfault.py"),
    ),
    Rule("netlink is spoken by system/", attribute("socket.AF_NETLINK"), ("system/",)),
    Rule(
        "processes are started by system/commands.py",
        attribute("os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "os.system", "os.popen", "pty.fork", "pty.spawn",
                  "os.execv", "os.execve", "os.execvp", "os.execvpe", "os.spawnv", "os.spawnve"),
        ("system/commands.py",),
        (("system/nsinit.py", "a program of its own: process 1 of a namespace, which starts CRIU in it"),),
    ),
    Rule("processes are started without multiprocessing", imported("multiprocessing", "concurrent.futures.process"), ()),
    Rule(
        "signals are sent by system/procfs, and by system/commands.py to its own children",
        attribute("os.kill", "os.killpg", "os.pidfd_open", "signal.pidfd_send_signal", "signal.pthread_kill"),
        ("system/procfs/", "system/commands.py"),
    ),
    Rule(
        "the person's streams belong to cli/",
        attribute("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"),
        ("cli/",),
        (
            ("accelerators/nvml_probe.py", "a program of its own, whose stdout is its answer"),
            ("owner/process.py", "the second process, whose stderr is a log in its run directory"),
            ("accelerators/cuda_probe.py", "a program of its own, whose stdout is its answer"),
        ),
    ),
    Rule("Typer's private modules are nobody's", imported("click", "typer._click", "typer._completion_shared", "typer.rich_utils"), ()),
    Rule(
        "host settings are read and written by system/hostsettings.py",
        text_that_begins_with("/proc/sys/", "/sys/kernel/mm"),
        ("system/hostsettings.py",),
        (("system/nsinit.py", "those of the namespace that it is process 1 of"),),
    ),
    Rule("the model does no I/O", imported("os", "io", "shutil", "socket", "subprocess", "tempfile", "glob"), ("",), ()),
)  # fmt: skip


def docstrings(tree: ast.AST) -> set[int]:
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


@cache
def nodes(source: str) -> list[ast.AST]:
    """Every node but docstrings; parsed once for all rules."""
    tree = ast.parse(source)
    words = docstrings(tree)
    return [node for node in ast.walk(tree) if id(node) not in words]


def offenders(rule: Rule, name: str, source: str) -> Iterator[str]:
    for node in nodes(source):
        found = rule.finds(node)
        if found is not None:
            yield f"{name}:{getattr(node, 'lineno', '?')}: {found}"


@cache
def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("rule", RULES[:-1], ids=lambda rule: rule.name)
def test_one_home(rule):
    elsewhere = {
        name: source
        for name, source in sources().items()
        if not name.startswith(rule.homes or ("-",)) and name not in dict(rule.excused)
    }
    found = [line for name, source in elsewhere.items() for line in offenders(rule, name, source)]
    assert not found, f"{rule.name}:\n" + "\n".join(found)


def test_the_model_does_no_io():
    found = [
        line
        for name, source in sources().items()
        if name.startswith("model/")
        for line in offenders(RULES[-1], name, source)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_who_is_excused_needs_it(rule):
    """An excuse that is not used any more goes."""
    for name, _reason in rule.excused:
        assert name in sources(), name
        assert list(offenders(rule, name, sources()[name])), name


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('open("/proc/self/maps")', 0),
        ('x = f"/proc/{pid}/stat"', 0),
        ('p = "/sys/fs/cgroup/x"', 1),
        ("import ctypes; ctypes.CDLL(None)", 2),
        ("from ctypes import CDLL", 2),
        ("socket.socket(socket.AF_NETLINK)", 3),
        ("os.posix_spawn('/x', [], {})", 4),
        ("from os import fork", 4),
        ("import multiprocessing.pool", 5),
        ("os.killpg(1, 9)", 6),
        ("sys.stderr.write('x')", 7),
        ("import click", 8),
        ("from typer._click import Context", 8),
        ('x = "/sys/kernel/mm/ksm/run"', 9),
        ("import os", 10),
    ],
)
def test_the_rules_can_fail(source, rule):
    assert list(offenders(RULES[rule], "x.py", source))


def test_words_about_proc_are_no_offence():
    assert not list(offenders(RULES[0], "x.py", '"""/proc/PID is read elsewhere."""\nx: str\n"""/proc too."""'))

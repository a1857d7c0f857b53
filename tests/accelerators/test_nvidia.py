"""GPU facts: versions and interfaces, NVML in child processes, GPUs that fail."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.accelerators import cuda_probe, nvidia, nvml
from gpuckpt.accelerators.cuda import CudaApi
from gpuckpt.accelerators.cuda_program import CudaProgram
from gpuckpt.accelerators.nvidia import Nvidia
from gpuckpt.flows import gather
from gpuckpt.flows.machine import this_machine
from gpuckpt.model.errors import MachineLacks
from gpuckpt.model.requests import DumpRequest
from tests import harness


@pytest.fixture
def host(fake_gpu, monkeypatch):
    """This process's environment has the fake driver; libcuda itself is loaded by path."""
    for name, value in fake_gpu.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nvidia.cuda, "LIBRARY", fake_gpu.libcuda)
    return fake_gpu


@pytest.mark.parametrize(
    ("version", "program", "interface", "words"),
    [
        ("610.57.04", False, "api", ""),
        ("580.159.04", False, "api", ""),
        ("570.86.15", True, "api", ""),
        ("565.57.01", True, "program", ""),
        ("555.42.02", True, "program", ""),
        ("565.57.01", False, "none", "needs the program cuda-checkpoint"),
        ("550.54.15", True, "none", "too old"),
        ("470.256.02", True, "none", "too old"),
        (None, True, "none", "cannot be read"),
        ("unknown", True, "none", "cannot be read"),
    ],
)
def test_the_interface_follows_from_the_drivers_version(version, program, interface, words):
    found, problem = nvidia.choose_interface(version, program=program)
    assert found == interface
    assert words in problem
    assert bool(problem) == (interface == "none")


@pytest.mark.parametrize(("number", "text"), [(13000, "13.0"), (12080, "12.8"), (13040, "13.4"), (None, None)])
def test_cuda_versions_in_words(number, text):
    assert nvidia.cuda_version_text(number) == text


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC 13.2\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: garbage\n", None),
    ],
)
def test_the_kernel_modules_version(tmp_path, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    assert nvidia.kernel_module_version(path) == version


def test_no_kernel_module(tmp_path):
    assert nvidia.kernel_module_version(tmp_path / "none") is None


def test_facts_of_a_host_with_two_gpus(host, start_fake_cuda_app):
    host.configure(gpus=2, total=64 << 20, others_1=5 << 20, mig_1=0)
    app = start_fake_cuda_app("--mib", "8")
    facts = Nvidia().driver()
    assert (facts.version, facts.cuda_version, facts.interface, facts.problem) == ("580.159.04", "13.0", "api", "")
    assert facts.program == host.program
    first, second = facts.gpus
    assert (first.index, first.name, first.uuid) == (0, "Fake GPU", "GPU-fa4e0000-0000-0000-0000-000000000000")
    assert (first.memory_total_bytes, first.memory_free_bytes) == (64 << 20, 56 << 20)
    assert second.memory_free_bytes == 59 << 20
    assert first.compute_pids == (app.pid,)
    assert second.compute_pids == ()
    assert (first.minor, first.pci_bus_id, first.persistence_mode) == (0, "00000000:01:00.0", True)
    assert (first.mig_enabled, second.mig_enabled) == (False, False)


def test_uses_are_of_the_processes_asked_for(host, start_fake_cuda_app):
    apps = [start_fake_cuda_app("--mib", str(mib)) for mib in (2, 4)]
    (use,) = Nvidia().uses([apps[1].pid, 1])
    assert (use.pid, use.memory_bytes) == (apps[1].pid, 4 << 20)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nvml.1=15", "GPU is lost"),
        ("nvml.1=999", "Unknown Error"),
        ("nvml.1=crash", "SIGSEGV"),
        ("nvml.1=hang", "did not answer within 1.5 s"),
    ],
)
def test_one_bad_gpu_does_not_hide_the_others(host, monkeypatch, fault, words):
    monkeypatch.setattr(nvml, "DEVICE_SECONDS", 1.5)
    host.configure(gpus=3)
    host.fail(fault)
    facts = Nvidia().driver()
    assert [gpu.index for gpu in facts.gpus] == [0, 1, 2]
    assert [bool(gpu.problem) for gpu in facts.gpus] == [False, True, False]
    assert words in facts.gpus[1].problem
    assert "Xid 79" in facts.gpus[1].problem
    assert facts.interface == "api"


def test_facts_that_were_prepared_are_those_of_when_they_are_asked_for(host):
    host.configure(gpus=2, total=64 << 20)
    gpus = Nvidia()
    gpus.get_ready()
    gpus.get_ready()
    host.configure(others_1=5 << 20)
    facts = gpus.driver()
    assert [gpu.memory_free_bytes for gpu in facts.gpus] == [64 << 20, 59 << 20]
    assert facts == Nvidia().driver()


@pytest.mark.parametrize("fault", ["nvml.0=crash", "nvml.0=hang", "nvml.init=crash"])
def test_a_prepared_probe_that_fails_is_asked_anew(host, monkeypatch, fault):
    monkeypatch.setattr(nvml, "DEVICE_SECONDS", 1.5)
    monkeypatch.setattr(nvml, "PREPARED_SECONDS", 1.5)
    host.configure(gpus=2)
    gpus = Nvidia()
    if fault.startswith("nvml.init"):
        host.fail(fault)
        gpus.get_ready()
        time.sleep(0.5)  # it is dead by then
        host.fail("state=0 call 99999")
    else:
        gpus.get_ready()
        host.fail(fault)
    facts = gpus.driver()
    assert [bool(gpu.problem) for gpu in facts.gpus] == [fault.startswith("nvml.0"), False]


def test_a_prepared_probe_whose_start_hangs_is_not_waited_for_twice(host, monkeypatch):
    monkeypatch.setattr(nvml, "DEVICE_SECONDS", 1.5)
    monkeypatch.setattr(nvml, "PREPARED_SECONDS", 0.1)
    monkeypatch.setattr(nvml, "_run_child", lambda *_: pytest.fail("it is asked anew"))
    host.fail("nvml.init=hang")
    assert "did not answer within 1.5 s" in nvml.Prepared().read().problem


def test_a_slow_start_has_the_time_of_a_start(host, monkeypatch):
    """Not the time of a reading: it would be thrown away, and begun anew."""
    monkeypatch.setattr(nvml, "PREPARED_SECONDS", 0.1)
    monkeypatch.setattr(nvml, "_run_child", lambda *_: pytest.fail("it is asked anew"))
    gpus = Nvidia()
    gpus.get_ready()
    assert not gpus.driver().problem


def test_a_probe_that_comes_up_after_its_starter_has_ended_ends(host):
    host.fail("nvml.init=hang")
    start = "from gpuckpt.accelerators.nvml import Prepared; import os; print(Prepared()._child.pid, flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=60)
    harness.wait_for(lambda: not harness.alive(int(done.stdout)), "the probe ends")


def test_lines_that_are_no_facts_are_none():
    readings = nvml.Readings()
    for line in ("17", "[]", "null", '"driver"', "{"):
        readings.take(line)
    assert readings == nvml.Readings()


def test_a_prepared_probe_ends_with_who_started_it(host):
    """Killed, so that nobody tells it anything."""
    start = "from gpuckpt.accelerators.nvml import Prepared; import signal; print(Prepared()._child.pid, flush=True); signal.pause()"
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    probe = int(parent.stdout.readline())
    time.sleep(0.3)
    assert harness.alive(probe)
    parent.kill()
    parent.communicate()
    harness.wait_for(lambda: not harness.alive(probe), "the probe ends")


def test_several_bad_gpus(host):
    host.configure(gpus=4)
    host.fail("nvml.0=crash", "nvml.2=crash")
    assert [bool(gpu.problem) for gpu in Nvidia().driver().gpus] == [True, False, True, False]


def test_a_driver_upgraded_without_a_reload_is_said_so(host):
    host.fail("nvml.init=18")
    facts = Nvidia().driver()
    assert facts.interface == "none"
    assert "reboot, or unload and load the nvidia module" in facts.problem
    with pytest.raises(MachineLacks, match="reboot"):
        Nvidia().suspender()


def test_nvml_that_cannot_be_used_is_a_problem_in_words(host):
    host.fail("nvml.init=9")
    facts = Nvidia().driver()
    assert facts.gpus == ()
    assert facts.problem


def test_nvml_that_crashes_at_its_start_is_a_problem_in_words(host, monkeypatch):
    host.fail("nvml.init=crash")
    readings = nvml.read()
    assert "SIGSEGV" in readings.problem
    assert Nvidia().driver().interface == "none"


def test_a_host_without_a_driver(monkeypatch, tmp_path):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(nvidia, "DEVICE", tmp_path / "none")
    monkeypatch.setattr(nvidia, "KERNEL_MODULE", tmp_path / "none")
    assert not Nvidia().present()
    assert Nvidia().driver().problem == "no NVIDIA driver is loaded on this host"
    assert Nvidia().uses([1]) == ()
    with pytest.raises(MachineLacks, match="no NVIDIA driver"):
        Nvidia().suspender()


def test_the_suspender_is_the_api_or_the_program(host):
    assert isinstance(Nvidia().suspender(), CudaApi)
    assert isinstance(Nvidia().suspender(force_program=True), CudaProgram)
    host.configure(driver="565.57.01")
    assert isinstance(Nvidia().suspender(), CudaProgram)
    host.configure(driver="550.54.15")
    with pytest.raises(MachineLacks, match=r"550\.54\.15 is too old"):
        Nvidia().suspender()


def test_who_is_only_to_be_asked_needs_no_nvml(host, monkeypatch, tmp_path, start_fake_cuda_app):
    host.fail("nvml.init=crash")
    module = tmp_path / "version"
    monkeypatch.setattr(nvidia, "KERNEL_MODULE", module)
    module.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n")
    app = start_fake_cuda_app("--mib", "2")
    questioner = Nvidia().questioner()
    assert isinstance(questioner, CudaApi)
    assert questioner.state(app.pid) == "running"
    assert questioner.restore_tid(app.pid)
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  565.57.01  Release Build\n")
    assert isinstance(Nvidia().questioner(), CudaProgram)
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Release Build\n")
    with pytest.raises(MachineLacks, match=r"550\.54\.15 is too old"):
        Nvidia().questioner()
    module.unlink()
    with pytest.raises(MachineLacks):  # only NVML can tell, and it crashes
        Nvidia().questioner()


def test_nvml_is_asked_once_before_a_dump(host, monkeypatch, tmp_path, start_fake_cuda_app):
    app = start_fake_cuda_app("--mib", "2")
    asked, read = [], nvml.read
    monkeypatch.setattr(nvml, "read", lambda: asked.append(1) or read())
    facts = gather.dump_facts(DumpRequest(pid=app.pid, image=tmp_path / "img"), this_machine(lambda _event: None))
    assert len(asked) == 1
    assert [one.id.pid for one in facts.tree.cuda] == [app.pid]
    assert [use.memory_bytes for use in facts.tree.gpu_uses] == [2 << 20]
    assert facts.host.gpu.interface == "api"


def test_a_probe_that_is_not_asked_ends(host):
    probe = cuda_probe.Asking()
    pid = probe._child.pid
    probe.close()
    assert not harness.alive(pid)


def test_forcing_a_program_that_is_not_there(host, monkeypatch):
    monkeypatch.setattr(nvidia, "PROGRAM", "no-such-cuda-checkpoint")
    with pytest.raises(MachineLacks, match="not on this host") as caught:
        Nvidia().suspender(force_program=True)
    assert "github.com/NVIDIA/cuda-checkpoint" in caught.value.hint


def test_mig_is_refused_when_all_gpus_are_in_that_mode(host):
    host.configure(gpus=2, mig_0=1)
    Nvidia().suspender()
    host.configure(mig_1=1)
    assert [gpu.mig_enabled for gpu in Nvidia().driver().gpus] == [True, True]
    with pytest.raises(MachineLacks, match="MIG"):
        Nvidia().suspender()


@pytest.mark.parametrize(("persistence", "initialises"), [(1, False), (0, True)])
def test_cuda_is_initialised_where_persistence_mode_is_off(host, persistence, initialises):
    host.configure(persistence=persistence)
    assert Nvidia().suspender()._initialise is initialises


def test_the_mps_daemon_is_known_by_its_pid_file(host, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not Nvidia().driver().mps
    sleeper = subprocess.Popen(["sleep", "60"])
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{sleeper.pid}\n")
    assert Nvidia().driver().mps
    sleeper.kill()
    sleeper.wait(10)
    assert not Nvidia().driver().mps


def test_importing_the_accelerators_loads_no_driver_library():
    test = (
        "import sys, gpuckpt.accelerators; "
        "assert 'pynvml' not in sys.modules; "
        "assert 'libcuda' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", test], check=True, timeout=30)


def test_no_probe_that_hangs_is_left_when_gpuckpt_is_killed(fake_gpu):
    fake_gpu.fail("nvml.0=hang")
    code = "from gpuckpt.accelerators import nvml; nvml.read()"
    main = subprocess.Popen([sys.executable, "-c", code], env=fake_gpu.environment)
    children = Path(f"/proc/{main.pid}/task/{main.pid}/children")
    probe = int(harness.wait_for(lambda: children.read_text().split(), "NVML is asked")[0])
    harness.wait_for(lambda: b"nvml_probe" in Path(f"/proc/{probe}/cmdline").read_bytes(), "by a program")
    harness.wait_for(lambda: str(fake_gpu.libraries) in Path(f"/proc/{probe}/maps").read_text(), "it hangs")
    main.kill()
    main.wait(30)
    harness.wait_for(lambda: not harness.alive(probe), "nothing is left")

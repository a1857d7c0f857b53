"""Checks of GPUs before a restore. Running out of GPU memory in one is final: the driver does not undo it."""

from __future__ import annotations

from collections.abc import Mapping

from gpuckpt.checks.check import Check, Judgement, failed, listing, none_of, passed, size, unknown
from gpuckpt.checks.facts import RestoreFacts
from gpuckpt.checks.gpu import gpu_name, major, mig_judgement
from gpuckpt.model.facts import Gpu
from gpuckpt.model.manifest import Manifest
from gpuckpt.model.report import Severity

OVERHEAD_BYTES = 1 << 30
"""What contexts need beside the recorded memory, on each GPU (an estimate from above)."""
MAP_DRIVER = 580


def find_gpu(name: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU a person means by an index, a UUID, or the beginning of one UUID only."""
    if name.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(name)), None)
    wanted = name.lower().removeprefix("gpu-")
    found = [gpu for gpu in gpus if wanted and gpu.uuid.lower().removeprefix("gpu-").startswith(wanted)]
    return found[0] if len(found) == 1 else None


def resolve_map(
    wishes: Mapping[str, str], old: tuple[Gpu, ...], new: tuple[Gpu, ...]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """`--gpu OLD=NEW` as UUID -> UUID, and what is wrong with it in words."""
    found: dict[str, str] = {}
    wrong: list[str] = []
    for old_name, new_name in wishes.items():
        source, target = find_gpu(old_name, old), find_gpu(new_name, new)
        if source is None:
            wrong.append(f"{old_name} is no GPU of the image")
        elif target is None:
            wrong.append(f"{new_name} is no GPU of this host")
        elif source.uuid in found:
            wrong.append(f"{gpu_name(source)} is named twice")
        elif target.uuid in found.values():
            wrong.append(f"{gpu_name(target)} is the target twice")
        else:
            found[source.uuid] = target.uuid
    return found, tuple(wrong)


def memory_by_gpu(manifest: Manifest) -> dict[str, int]:
    """GPU UUID at the dump -> bytes the tree had there; empty when it is not known."""
    found: dict[str, int] = {}
    for process in manifest.cuda:
        for uuid, count in process.gpu_memory_bytes.items():
            found[uuid] = found.get(uuid, 0) + count
    if not found:
        for use in manifest.tree.gpu_uses:
            found[use.gpu_uuid] = found.get(use.gpu_uuid, 0) + (use.memory_bytes or 0)
    return found


def _map(facts: RestoreFacts) -> tuple[dict[str, str], tuple[str, ...]]:
    return resolve_map(facts.request.gpu_map, facts.manifest.host.gpu.gpus, facts.host.gpu.gpus)


def targets(facts: RestoreFacts) -> dict[str, str]:
    """UUID at the dump -> UUID here, for every GPU that held memory of the tree."""
    mapping, _ = _map(facts)
    return {uuid: mapping.get(uuid, uuid) for uuid in memory_by_gpu(facts.manifest)}


def _here(facts: RestoreFacts) -> dict[str, Gpu]:
    return {gpu.uuid: gpu for gpu in facts.host.gpu.gpus}


def _there(facts: RestoreFacts) -> dict[str, Gpu]:
    return {gpu.uuid: gpu for gpu in facts.manifest.host.gpu.gpus}


def _same_driver(facts: RestoreFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    here, there = facts.host.gpu.version, facts.manifest.host.gpu.version
    expected = f"driver {there or '(not recorded)'}, the one of the dump"
    hint = f"restore it on a host with driver {there}, or install that one: the process holds its libraries in memory"
    if here is None or there is None:
        return unknown(expected, f"driver {here or '(not known)'}", hint)
    return passed(expected, f"driver {here}") if here == there else failed(expected, f"driver {here}", hint)


def _libraries(facts: RestoreFacts) -> Judgement | None:
    libraries = [file for file in facts.tree.files if is_driver_library(file.path) and not file.deleted]
    if not libraries:
        return None
    wrong = []
    for file in libraries:
        here = facts.files_here.get(file.path)
        if here is None:
            wrong.append(f"{file.path} is missing")
        elif (here.size, here.build_id) != (file.size, file.build_id):
            wrong.append(f"{file.path} is another build")
    there = facts.manifest.host.gpu.version
    hint = f"install exactly driver {there}: the libraries lie in the process's memory and must be the same files"
    return none_of(wrong, expected=f"the libraries of driver {there}", hint=hint, fine=f"{len(libraries)} are the same")


def is_driver_library(path: str) -> bool:
    """libcuda, libnvidia-ml and the like: they belong to the driver and change with it."""
    return path.rpartition("/")[2].startswith(("libcuda.so", "libcudadebugger.so", "libnvidia-", "libnvcuvid"))


def suggested_map(facts: RestoreFacts) -> str:
    """'--gpu 0=1 --gpu 1=0' that pairs GPUs of one model by index; empty where they cannot be paired."""
    free = list(facts.host.gpu.gpus)
    options = []
    for old in facts.manifest.host.gpu.gpus:
        new = next((gpu for gpu in free if gpu.uuid == old.uuid), None)
        new = new or next((gpu for gpu in free if gpu.name == old.name), None)
        if new is None:
            return ""
        free.remove(new)
        options.append(f"--gpu {old.index}={new.index}")
    return " ".join(options)


def _models(gpus: tuple[Gpu, ...]) -> str:
    return listing(f"{gpu.index}: {gpu.name}" for gpu in gpus) or "no GPU"


def _present(facts: RestoreFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    here, there = _here(facts), _there(facts)
    expected = "the GPUs of the dump, or others named by --gpu"
    missing = [old for old, new in targets(facts).items() if new not in here]
    names = (gpu_name(there[uuid]) if uuid in there else uuid for uuid in missing)
    suggestion = suggested_map(facts)
    hint = (
        f"say {suggestion}"
        if suggestion and not facts.request.gpu_map
        else f"restore it on a host with the same GPUs; the dump's: {_models(facts.manifest.host.gpu.gpus)}; "
        f"this host's: {_models(facts.host.gpu.gpus)}"
    )
    if not missing and not targets(facts):
        fits = set(there) <= set(here) or bool(facts.request.gpu_map)
        return passed(expected, "they are here") if fits else unknown(expected, "not known which it used", hint)
    return none_of((f"{name} is not here" for name in names), expected=expected, hint=hint, fine="they are here")


def _map_complete(facts: RestoreFacts) -> Judgement | None:
    if not facts.request.gpu_map:
        return None
    if not facts.uses_cuda:
        return failed("an image with GPU state, for --gpu", "it holds none", "leave --gpu out", "warn")
    mapping, wrong = _map(facts)
    driver, there = facts.host.gpu, _there(facts)
    expected = "a map of every GPU the job could see to one GPU here each"
    if major(driver) < MAP_DRIVER:
        return failed(expected, f"driver {driver.version}", f"drivers move jobs between GPUs from {MAP_DRIVER} on")
    hint = f"say {suggested_map(facts)}" if suggested_map(facts) else "name each of them once: --gpu OLD=NEW"
    wrong += tuple(f"GPU {uuid} is not mapped" for uuid in memory_by_gpu(facts.manifest) if uuid not in mapping)
    if wrong:
        return failed(expected, listing(wrong), hint)
    rest = [gpu_name(gpu) for uuid, gpu in there.items() if uuid not in mapping]
    if rest:
        hint = f"{hint}; the driver refuses a map that lacks a GPU the job could see, used or not"
        return unknown(expected, f"not mapped, right only if the job could not see it: {listing(rest)}", hint)
    return passed(expected, f"{len(mapping)} mapped")


def _model(facts: RestoreFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    here, there = _here(facts), _there(facts)
    pairs = {**targets(facts), **_map(facts)[0]}
    wrong = []
    for old, new in pairs.items():
        if old in there and new in here and _kind(there[old]) != _kind(here[new]):
            wrong.append(f"{gpu_name(here[new])} in place of {gpu_name(there[old])}")
    hint = "map each GPU to one of the same model and memory; the driver restores on no other"
    return none_of(wrong, expected="GPUs of the same model", hint=hint, fine="the same")


def _kind(gpu: Gpu) -> tuple[str, int | None]:
    return gpu.name, gpu.memory_total_bytes


def _count(facts: RestoreFacts) -> Judgement | None:
    if not facts.uses_cuda or not facts.request.gpu_map:
        return None
    here, there = facts.host.gpu.gpus, facts.manifest.host.gpu.gpus
    expected = f"as many GPUs as at the dump: {_models(there)}"
    if len(here) == len(there):
        return passed(expected, _models(here))
    hint = "the driver is known to accept a map only where as many GPUs are visible; use such a host"
    severity: Severity = "block" if len(here) < len(memory_by_gpu(facts.manifest)) else "warn"
    return failed(expected, _models(here), hint, severity)


def _target_gpus(facts: RestoreFacts) -> tuple[Gpu, ...]:
    here = _here(facts)
    wanted = targets(facts).values()
    return tuple(here[uuid] for uuid in wanted if uuid in here) or facts.host.gpu.gpus


def _mig(facts: RestoreFacts) -> Judgement | None:
    return mig_judgement(_target_gpus(facts)) if facts.uses_cuda else None


def _memory(facts: RestoreFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    here, needs, places = _here(facts), memory_by_gpu(facts.manifest), targets(facts)
    rule = "free GPU memory for what the job had and 1 GiB on each GPU"
    hint = "free it (the restore would run out half-way, which the driver cannot undo), or name other GPUs by --gpu"
    unread = [uuid for uuid, gpu in here.items() if uuid in places.values() and gpu.memory_free_bytes is None]
    if not needs or unread:
        what = "the free memory could not be read" if unread else "the image does not say how much it had"
        return unknown(rule, what, f"look at `nvidia-smi`; {hint}")
    short = []
    for old, new in places.items():
        need, free = needs[old] + OVERHEAD_BYTES, here[new].memory_free_bytes if new in here else None
        if free is not None and free < need:
            held = ", ".join(_holders(facts, here[new])) or "nobody that NVML names"
            short.append(f"{gpu_name(here[new])} needs {size(need)}, has {size(free)} free; held by {held}")
    total = size(sum(needs.values()))
    return none_of(short, expected=rule, hint=hint, fine=f"enough for {total}")


def _holders(facts: RestoreFacts, gpu: Gpu) -> tuple[str, ...]:
    return facts.gpu_holders.get(gpu.uuid) or tuple(f"process {pid}" for pid in gpu.compute_pids)


def _bus_ids(facts: RestoreFacts) -> Judgement | None:
    sensitive = any("libnccl" in file.path or "libnvidia-ml" in file.path for file in facts.tree.files)
    if not facts.uses_cuda or not sensitive:
        return None
    here, there = _here(facts), _there(facts)
    moved = [
        f"{gpu_name(there[old])} was at {there[old].pci_bus_id}, is at {here[new].pci_bus_id}"
        for old, new in targets(facts).items()
        if old in there and new in here and there[old].pci_bus_id.lower() != here[new].pci_bus_id.lower()
    ]
    hint = "the job still sees the old PCI bus id: NCCL or NVML calls it makes anew may fail with 'Not Found'"
    return none_of(moved, expected="GPUs at the same PCI bus ids", hint=hint, fine="the same")


SAME_DRIVER: Check[RestoreFacts] = Check(
    "gpu-same-driver", "block", "the driver has the version of the dump", _same_driver, irreversible=True
)
GPU_LIBRARIES: Check[RestoreFacts] = Check(
    "gpu-libraries", "block", "the driver's libraries are the same files", _libraries, allowable=False
)
GPU_PRESENT: Check[RestoreFacts] = Check(
    "gpu-present", "block", "the GPUs of the dump are here, or others are named", _present
)
GPU_MAP: Check[RestoreFacts] = Check("gpu-map", "block", "--gpu names every GPU once", _map_complete)
GPU_MODEL: Check[RestoreFacts] = Check("gpu-model", "block", "each GPU is of the dump's model", _model)
GPU_COUNT: Check[RestoreFacts] = Check("gpu-count", "warn", "with --gpu: as many GPUs as at the dump", _count)
GPU_MIG_HERE: Check[RestoreFacts] = Check("gpu-mig", "block", "the GPUs are not in MIG mode", _mig)
GPU_MEMORY: Check[RestoreFacts] = Check(
    "gpu-memory", "block", "the GPUs have enough free memory", _memory, irreversible=True
)
GPU_BUS_IDS: Check[RestoreFacts] = Check("gpu-bus-ids", "warn", "GPUs keep their PCI bus ids", _bus_ids)

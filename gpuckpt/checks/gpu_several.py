"""A CUDA process on several GPUs at once.

Two H200s, driver 580.159.04: a PyTorch process with memory on both, which copied directly from one to the other, was
suspended and saved; the driver then refused to restore it (INVALID_VALUE), and nothing brought it back. Another such
process came back when the driver was called without arguments. What makes the difference is not known, so a job is not
risked for it unasked. Processes with one GPU each, NCCL ranks for example, are no such case: they came back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.checks.check import Check, Judgement, none_of
from gpuckpt.checks.facts import DumpFacts

if TYPE_CHECKING:
    from gpuckpt.model.facts import Tree


def _several(facts: DumpFacts) -> Judgement | None:
    if not facts.uses_cuda:
        return None
    return none_of(
        (f"{pid} has memory on {len(gpus)} GPUs" for pid, gpus in _gpus_of(facts.tree).items() if len(gpus) > 1),
        expected="CUDA processes with one GPU each",
        hint="the driver can save such a process and then refuse to restore it: try it with a job that you can lose",
        fine="they have",
    )


def _gpus_of(tree: Tree) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for use in tree.gpu_uses:
        found.setdefault(use.pid, set()).add(use.gpu_uuid)
    return found


GPU_SEVERAL: Check[DumpFacts] = Check("gpu-several", "block", "no CUDA process uses several GPUs at once", _several)

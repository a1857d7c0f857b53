"""State in PyTorch's GPU memory: words that follow the contract's rule, and constant tensors."""

from __future__ import annotations

import contract
import torch

CHUNK_ELEMENTS = 1 << 28
"""1 GiB of float32: the largest tensor."""


def constant(gib: float, device: str = "cuda") -> list[torch.Tensor]:
    """Random tensors that no step changes."""
    left, tensors = int(gib * (1 << 28)), []
    generator = torch.Generator(device=device).manual_seed(0)
    while left > 0:
        tensors.append(torch.randn(min(left, CHUNK_ELEMENTS), device=device, generator=generator))
        left -= CHUNK_ELEMENTS
    return tensors


def advance(words: torch.Tensor) -> torch.Tensor:
    """One step of the rule, in place and on the current stream."""
    return words.mul_(contract.A).add_(contract.C).bitwise_and_(contract.MASK)


def value(words: torch.Tensor) -> int:
    """The value of the rule; waits for the GPU."""
    return int(words.sum().item()) & contract.MASK


def checksum(tensors: list[torch.Tensor]) -> str:
    """All 32-bit words as integers, weighted by their place: exact, on the GPU, and order matters."""
    total = 0
    for tensor in tensors:
        for part in tensor.flatten().view(torch.int32).split(1 << 24):
            weights = torch.arange(1, part.numel() + 1, device=part.device, dtype=torch.int64)
            total = (total * 31 + int((part.to(torch.int64) * weights).sum().item())) % (1 << 61)
    return f"{total:016x}"


class State:
    """The words and the constant memory of one process."""

    def __init__(self, gib: float, *, words: int = contract.WORDS, device: str = "cuda") -> None:
        self.constant = constant(gib, device)
        self.words = torch.arange(words, device=device, dtype=torch.int64)

    def step(self, _number: int = 0) -> int:
        """Advance, and the value."""
        advance(self.words)
        return value(self.words)

    def digest(self) -> str:
        """Of the constant memory."""
        return checksum(self.constant)

"""How one worker uses its GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuSettings:
    memory_share: float = 0.9  # of the GPU's memory, for weights, pages and work
    max_batch: int = 256  # requests of a decode step
    chunk_tokens: int = 8192  # prompt tokens of a step
    share: float = 1.0  # of the GPU's multiprocessors

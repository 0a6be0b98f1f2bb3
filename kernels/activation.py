"""The gate of the feed-forward layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * size] -> silu(gate) * up, [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)

"""Root-mean-square normalization."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

    __slots__ = ("_floor", "_scaled", "epsilon", "weight")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        size = weight.shape[0]
        self.weight = weight  # [size]
        self.epsilon = epsilon
        self._scaled = weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * epsilon), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        if x.dtype != torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        # hypot(|x|, sqrt(size * epsilon)) = sqrt(size) * sqrt(mean(x^2) + epsilon), in two
        # operations instead of the five of the written formula.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.div(x, length).mul_(self._scaled)

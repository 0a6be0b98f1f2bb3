"""A linear layer of which each rank of a group has a part."""

from __future__ import annotations

from torch import Tensor

from baton.engine.group import Group
from baton.kernels.linear import Linear


class SummedLinear(Linear):
    """Cut by inputs: what the ranks make of theirs is summed up. Only rank 0 has the bias."""

    __slots__ = ("group",)

    def __init__(self, weight: Tensor, bias: Tensor | None, group: Group) -> None:
        super().__init__(weight, bias)
        self.group = group

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, out], the same on all ranks, + the sum."""
        part = self(x) if self.group.split.rank else super().add_to(residual, x)
        return self.group.sum(part)

"""Reads the tensors of this rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from baton.engine.architecture import Architecture, Split
from baton.engine.checkpoint import Arrange, Checkpoint, Cut
from baton.engine.random_tensors import RandomTensors
from baton.kernels.linear import RMSNorm

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class WeightReader:
    source: Checkpoint | RandomTensors
    architecture: Architecture  # of the rank's part
    split: Split
    dtype: torch.dtype
    device: str

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.empty(*shape)
        self.source.copy(name, tensor)
        return tensor

    def cut(self, dimension: int, *sizes: int) -> Cut:
        """This rank's `sizes` of parts that all ranks share evenly."""
        return Cut.of_rank(self.split, dimension, sizes)

    def norm(
        self, name: str, size: int, arrange: Arrange | None = None, cut: Cut | None = None
    ) -> RMSNorm:
        """A norm. With an offset its weight is in float32, since the sum may need more digits."""
        offset = self.architecture.norm_offset
        dtype = torch.float32 if offset else self.dtype
        weight = torch.empty(size, dtype=dtype, device=self.device)
        self.source.copy(name, weight, arrange, cut)
        return RMSNorm(weight.add_(offset) if offset else weight, self.architecture.norm_epsilon)

    def stored(self, names: Sequence[Name], tensor: Callable[[Name], str]) -> Name:
        """The first of the names whose tensor is present; the first one if none is."""
        return next((name for name in names if tensor(name) in self.source), names[0])

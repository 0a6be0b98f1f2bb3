"""Random weights instead of a checkpoint's."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from baton.engine.checkpoint import Arrange, Cut

SPREAD = 0.02
"""Standard deviation of random weights."""


class RandomTensors:
    """Stands in for a Checkpoint in measurements: the same numbers every time; norms are one.

    Numbers depend on a tensor's name and whole shape alone, so that ranks agree on them.
    """

    def __init__(self, device: str) -> None:
        self._generator = torch.Generator(device)

    def __contains__(self, name: str) -> bool:
        """Tied weights are stored once."""
        return name != "lm_head.weight"

    def copy(
        self, name: str, target: Tensor, arrange: Arrange | None = None, cut: Cut | None = None
    ) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            return
        self._generator.manual_seed(zlib.crc32(name.encode()))
        shape = cut.whole_shape(target) if cut else target.shape
        whole = target.new_empty(shape).normal_(0.0, SPREAD, generator=self._generator)
        mine = cut.of(whole) if cut else whole
        target.copy_(arrange(mine) if arrange else mine)

    def fine_grid(self, name: str, cut: Cut) -> None:
        """Has no codes."""

    def grid(self, name: str, cut: Cut) -> None:
        """They are not quantized."""

    def skip(self, name: str) -> None:
        pass

    def finish(self, not_run: tuple[str, ...] = ()) -> None:
        pass


class TensorSizes(RandomTensors):
    """Stands in for a Checkpoint of a model without memory: counts the bytes of its weights."""

    def __init__(self) -> None:
        self.bytes = 0

    def copy(
        self, name: str, target: Tensor, arrange: Arrange | None = None, cut: Cut | None = None
    ) -> None:
        self.bytes += target.nbytes

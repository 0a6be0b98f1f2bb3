"""A model's weights as codes: those of its checkpoint, or of a quantization.

On GPUs the integers of a checkpoint stay as they are (kernels/packed.py). Weights are dequantized
while they are loaded, then packed again, so that code that rearranges, joins, splits or balances
weights does not handle codes. Weights that cannot be packed stay dequantized, with the same
answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from baton.engine.gpu.device import CODES_CAPABILITY
from baton.engine.model import Layer
from baton.engine.model_choice import WeightQuantization
from baton.kernels.experts import Experts
from baton.kernels.linear import AnyLinear, Linear, WeightCodes, describe_integers
from baton.kernels.packed import Grid

log = logging.getLogger(__name__)

PACKED: dict[str, WeightCodes] = {"int8": "packed_int8", "int4": "packed_int4"}
"""The codes of quantizations on GPUs."""


def packs(device: str, dtype: torch.dtype) -> bool:
    """True if the device multiplies packed weights like the matrix library multiplies plain
    ones."""
    if not device.startswith("cuda") or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= CODES_CAPABILITY


def describe_quantization(quantization: WeightQuantization, dtype: str, device: str) -> str:
    """Names the code that multiplies the weights, or warns of their loss."""
    if quantization == "fp8":
        return "; a small model loses by fp8 (baton doctor --quality)"
    if quantization == "none" or device != "cpu":
        return ""
    return f"; {quantization} weights {describe_integers(dtype)}"


def join_grids(grids: Sequence[Grid | None]) -> Grid | None:
    """The grid of weights joined by outputs; None if one has no grid, or one with other bits."""
    known = [grid for grid in grids if grid is not None]
    if len(known) < len(grids) or len({grid.bits for grid in known}) != 1:
        return None
    scales, zeros, bits = zip(*known, strict=True)
    return Grid(torch.cat(scales), torch.cat(zeros), bits[0])


class CodedWeights:
    """The codes of a model's weights, layer by layer."""

    def __init__(self, quantization: WeightQuantization, *, packed: bool) -> None:
        """`packed`: integers are packed for GPUs."""
        self._packed = packed
        self._quantization = quantization
        self._grids: list[tuple[AnyLinear, Grid]] = []
        self._count = 0

    @property
    def of_checkpoint(self) -> bool:
        """True if the checkpoint's own codes are kept."""
        return self._packed and self._quantization == "none"

    def add(self, linear: AnyLinear, grid: Grid | None) -> None:
        """Adds a linear layer that was loaded, with the grid of the checkpoint's codes."""
        if grid is not None:
            self._grids.append((linear, grid))

    def finish_layer(self, layer: Layer) -> None:
        """Called when the layer's weights have their final arrangement."""
        if self._quantization != "none":
            layer.quantize(self._kind())
        for linear, grid in self._grids:
            if linear is layer.qkv and layer.balance is not None:
                grid.scales[: len(layer.balance)] *= layer.balance.float().unsqueeze(1)
            self._count += linear.pack_codes(grid)
        self._grids.clear()

    def finish_head(self, head: Linear) -> Linear:
        """Rounds a float32 head of a quantized model to bfloat16, which halves its bytes
        (kernels/cpu/panels.py). In int8 it would lose too much."""
        if self._quantization in ("int8", "int4") and head.weight.dtype == torch.float32:
            head.weight = head.weight.bfloat16().float()
        return head

    def report(self, layers: Sequence[Layer]) -> None:
        """Logs how many linear layers keep the checkpoint's codes."""
        if not self.of_checkpoint:
            return
        experts = sum(isinstance(layer.mlp, Experts) for layer in layers)
        rest = 4 * len(layers) - 2 * experts - self._count
        log.info("%d linear layers keep the checkpoint's codes", self._count)
        if rest or experts:
            log.info("dequantized: %d linear layers, experts in %d layers", rest, experts)

    def _kind(self) -> WeightCodes:
        assert self._quantization != "none"
        plain = self._quantization
        return PACKED.get(plain, plain) if self._packed else plain

"""A model's weights as codes: those of its checkpoint, or of a quantization.

The integers of a checkpoint stay as they are: on GPUs packed (kernels/packed.py), on CPUs with
float32 as bytes (kernels/exact_codes.py). Weights are dequantized while they are loaded, then
encoded again, so that code that rearranges, joins, splits or balances weights does not handle
codes. Weights that cannot be encoded stay dequantized, with the same answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from baton.engine.checkpoint import Checkpoint, Cut
from baton.engine.gpu.device import CODES_CAPABILITY
from baton.engine.model import Layer
from baton.engine.model_choice import WeightQuantization
from baton.engine.random_tensors import RandomTensors
from baton.kernels.cpu import compiler
from baton.kernels.exact_codes import FineGrid, join_fine
from baton.kernels.experts import Experts
from baton.kernels.linear import AnyGrid, AnyLinear, Linear, WeightCodes, describe_integers
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


def multiplies_exact_codes(device: str, dtype: torch.dtype) -> bool:
    """True if the device has compiled products of codes that lose nothing."""
    return dtype == torch.float32 and compiler.suits(dtype, torch.device(device))


def join_grids(grids: Sequence[AnyGrid | None]) -> AnyGrid | None:
    """The grid of weights joined by outputs; None if one has no grid, or one with other bits."""
    if any(isinstance(grid, FineGrid) for grid in grids):
        return join_fine([grid if isinstance(grid, FineGrid) else None for grid in grids])
    known = [grid for grid in grids if isinstance(grid, Grid)]
    if len(known) < len(grids) or len({grid.bits for grid in known}) != 1:
        return None
    scales, zeros, bits = zip(*known, strict=True)
    return Grid(torch.cat(scales), torch.cat(zeros), bits[0])


class CodedWeights:
    """The codes of a model's weights, layer by layer."""

    def __init__(self, quantization: WeightQuantization, *, packed: bool, exact: bool) -> None:
        """`packed`: integers are packed for GPUs. `exact`: float32 weights may be kept as codes
        that lose nothing."""
        self._packed = packed
        self._exact = exact and quantization == "none"
        self._quantization = quantization
        self._grids: list[tuple[AnyLinear, AnyGrid]] = []
        self._count = 0

    def grid(self, source: Checkpoint | RandomTensors, name: str, cut: Cut) -> AnyGrid | None:
        """The grid of the checkpoint's own codes if they are kept, before the tensor is copied."""
        if self._packed and self._quantization == "none":
            return source.grid(name, cut)
        return self.exact_grid(source, name, cut)

    def exact_grid(
        self, source: Checkpoint | RandomTensors, name: str, cut: Cut
    ) -> FineGrid | None:
        """As `grid`, of codes that float32 weights are kept as."""
        return source.fine_grid(name, cut) if self._exact else None

    def add(self, linear: AnyLinear, grid: AnyGrid | None) -> None:
        """Adds a linear layer that was loaded, with the grid of the checkpoint's codes."""
        if grid is not None:
            self._grids.append((linear, grid))

    def finish_layer(self, layer: Layer) -> None:
        """Called when the layer's weights have their final arrangement."""
        if self._quantization != "none":
            layer.quantize(self._kind())
        for linear, grid in self._grids:
            if linear is layer.qkv and layer.balance is not None:
                balance = layer.balance.float().unsqueeze(1)
                grid.scales[: len(balance)] *= balance
                if isinstance(grid, FineGrid):
                    grid.offsets[: len(balance)] *= balance
        self._encode()

    def _encode(self) -> None:
        for linear, grid in self._grids:
            self._count += linear.keep_codes(grid)
        self._grids.clear()

    def finish_head(self, head: Linear) -> Linear:
        """Rounds a float32 head of a quantized model to bfloat16, which halves its bytes
        (kernels/cpu/panels.py). In int8 it would lose too much."""
        if self._quantization in ("int8", "int4") and head.weight.dtype == torch.float32:
            head.weight = head.weight.bfloat16().float()
        self._encode()
        return head

    def report(self, layers: Sequence[Layer]) -> None:
        """Logs how many linear layers keep the checkpoint's codes."""
        if self._quantization != "none" or not (self._packed or self._count):
            return
        experts = sum(isinstance(layer.mlp, Experts) for layer in layers)
        rest = 4 * len(layers) + self._exact - 2 * experts - self._count
        log.info("%d linear layers keep the checkpoint's codes", self._count)
        if rest or experts:
            log.info("dequantized: %d linear layers, experts in %d layers", rest, experts)

    def _kind(self) -> WeightCodes:
        assert self._quantization != "none"
        plain = self._quantization
        return PACKED.get(plain, plain) if self._packed else plain

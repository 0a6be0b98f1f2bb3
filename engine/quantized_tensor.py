"""Quantized weights of a checkpoint, in one form for all formats:

    weight[output, input] = (code - zero) * scale

Zeros and scales are small matrices, with a row for the output and a column for the input: one
number for all weights, for each output, for each group of inputs, or for each block.

    format                               codes                          scales, zeros
    compressed-tensors, not packed; fp8  weight [out, in], one byte     as codes
    compressed-tensors, packed           weight_packed, words of in     zeros are words of out
    GPTQ                                 qweight [in words, out]        [groups, out], zeros words
    AWQ                                  qweight [in, out words]        [groups, out], zeros words

A word has 32 bits, with the first code in the lowest ones; of AWQ's eight codes, those with even
indices come first. GPTQ and compressed-tensors may name each input's group (act-order).

MXFP4 is dequantized as a whole: blocks of 32 numbers of four bits, each block with a power of two.
bfloat16 holds each number exactly. A tensor is kept as two tensors of bytes:

    NAME_blocks  [experts, outputs, inputs / 32, 16]: two numbers a byte, the lower bits first
    NAME_scales  [experts, outputs, inputs / 32]: the exponents, plus 127
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from baton.core.errors import InvalidCheckpoint
from baton.engine.quantization_config import PACKED_BITS, Quantization
from baton.kernels.packed import INPUTS, Bits, Grid

PARTS = (
    *("weight", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    *("weight_packed", "weight_shape", "weight_g_idx", "qweight", "scales", "qzeros", "g_idx"),
)
"""The parts of one weight; a module with any but the first is quantized."""

NOT_USED = {
    f"{what}_{part}"
    for what in ("input", "output", "activation", "q", "k", "v", "kv", "prob")
    for part in ("scale", "zero_point", "global_scale")
}
"""Scales and zero points of activations, queries, keys and values, such as k_scale: these stay as
they are computed."""

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))
"""The numbers of MXFP4, by code."""

CHUNK = 1 << 22
"""Weights dequantized at once: a whole tensor in float32 would take much memory."""


class Packed(NamedTuple):
    """Codes in words of 32 bits, each with 32 / bits codes along one dimension."""

    words: Tensor  # int32
    dimension: int
    bits: int
    even_first: bool = False  # a word has its codes with even indices first

    @property
    def shape(self) -> torch.Size:
        shape = list(self.words.shape)
        shape[self.dimension] *= 32 // self.bits
        return torch.Size(shape)

    def narrow(self, dimension: int, start: int, size: int) -> Tensor:
        """Like Tensor.narrow, of the codes as bytes."""
        if dimension != self.dimension:
            return self._codes(self.words.narrow(dimension, start, size))
        each = 32 // self.bits
        first, end = start // each, -(-(start + size) // each)
        words = self.words.narrow(dimension, first, end - first)
        return self._codes(words).narrow(dimension, start - first * each, size)

    def all(self) -> Tensor:
        return self._codes(self.words)

    def _codes(self, words: Tensor) -> Tensor:
        copied = words.movedim(self.dimension, -1).clone(memory_format=torch.contiguous_format)
        found = copied.view(torch.uint8)
        if self.bits == 4:
            found = torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)
        if self.even_first:
            halves = found.view(*found.shape[:-1], -1, 2, 16 // self.bits)
            found = halves.transpose(-2, -1).flatten(-3)
        return found.movedim(-1, self.dimension).contiguous()


class QuantizedTensor(NamedTuple):
    """A weight. Any part of it can be dequantized: in float32, rounded once to its dtype."""

    codes: Tensor | Packed  # [outputs, inputs]
    scales: Tensor  # [rows, columns], float32
    zeros: Tensor | None  # [rows, columns], float32
    rows: Tensor  # [outputs], each output's row of `scales`
    columns: Tensor  # [inputs], each input's column
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def narrow(self, dimension: int, start: int, size: int) -> Tensor:
        """Like Tensor.narrow, dequantized."""
        codes = self.codes.narrow(dimension, start, size)
        rows, columns = (
            each.narrow(0, start, size) if dimension == index else each
            for index, each in enumerate((self.rows, self.columns))
        )
        found = torch.empty(codes.shape, dtype=self.dtype)
        step = max(1, CHUNK // max(1, codes.shape[1]))
        for first in range(0, len(codes), step):
            some = slice(first, first + step)
            numbers = codes[some].float()
            if self.zeros is not None:
                numbers -= _spread(self.zeros, rows[some], columns)
            torch.mul(numbers, _spread(self.scales, rows[some], columns), out=numbers)
            found[some] = numbers
        return found

    def grid(self, rows: Tensor, columns: Tensor) -> Grid | None:
        """The scales and zeros of these outputs and inputs. None if neighbouring inputs have
        several scales, or codes are not integers."""
        bits = self._integer_bits()
        if bits is None or len(columns) % INPUTS:
            return None
        some = self.columns[columns].view(-1, INPUTS)
        if bool((some != some[:, :1]).any()):
            return None
        places = self.rows[rows], some[:, 0]
        size = len(rows), len(some)
        scales = _spread(self.scales, *places).expand(size)
        zeros = torch.zeros(size) if self.zeros is None else _spread(self.zeros, *places)
        # Codes in bytes are signed, packed codes are not.
        zeros = zeros.expand(size) + (0 if isinstance(self.codes, Packed) else 128)
        return Grid(scales, zeros, bits)

    def _integer_bits(self) -> Bits | None:
        if isinstance(self.codes, Packed):
            return 4 if self.codes.bits == 4 else 8
        return 8 if self.codes.dtype == torch.int8 else None


def _spread(small: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[rows, columns], or [rows, 1] if all columns are the same."""
    chosen = small.index_select(0, rows)
    return chosen if small.shape[1] == 1 else chosen.index_select(1, columns)


class OpenFile(Protocol):
    """Has the interface of an open safetensors file."""

    def get_tensor(self, name: str) -> Tensor: ...


class QuantizedWeight:
    """The stored parts of one weight."""

    def __init__(self, module: str, files: dict[str, OpenFile], quantization: Quantization) -> None:
        self._module = module
        self._files = files
        self.quantization = quantization

    def get_tensor(self, _: str) -> QuantizedTensor:
        """The weight. Has the interface of an open file."""
        if self.quantization.method in ("awq", "gptq"):
            return _by_inputs(self)
        return _packed(self) if "weight_packed" in self else _bytes(self)

    def __contains__(self, part: str) -> bool:
        return part in self._files

    def __getitem__(self, part: str) -> Tensor:
        name = f"{self._module}.{part}"
        if part not in self:
            raise InvalidCheckpoint(f"tensor {name} is missing from the checkpoint")
        return self._files[part].get_tensor(name)

    def words(self, part: str) -> Tensor:
        found = self[part]
        if found.dtype != torch.int32 or found.dim() != 2:
            self.refuse(f"{part} {list(found.shape)} of {found.dtype}, not a matrix of torch.int32")
        return found

    def refuse(self, why: str) -> NoReturn:
        raise InvalidCheckpoint(f"tensor {self._module}.weight is not quantized as stated: {why}")


def join_parts(
    stored: dict[str, OpenFile], quantization: Quantization
) -> dict[str, OpenFile | QuantizedWeight]:
    """Joins the parts of each weight, which may be in several files. Other tensors stay as they
    are."""
    if quantization.method == "mxfp4":
        return _join_blocks(stored)
    kept = {name: file for name, file in stored.items() if _part(name) not in NOT_USED}
    modules: dict[str, dict[str, OpenFile]] = {}
    for name in kept:
        if _part(name) in PARTS[1:]:
            modules[name.rpartition(".")[0]] = {}
    for name in list(kept):
        module = name.rpartition(".")[0]
        if module in modules and _part(name) in PARTS:
            modules[module][_part(name)] = kept.pop(name)
    weights = {
        f"{module}.weight": QuantizedWeight(module, files, quantization)
        for module, files in modules.items()
    }
    return {**kept, **weights}


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def _bytes(parts: QuantizedWeight) -> QuantizedTensor:
    codes = parts["weight"]
    if codes.dtype not in (torch.float8_e4m3fn, torch.int8) or codes.dim() != 2:
        parts.refuse(f"weight {list(codes.shape)} of {codes.dtype}")
    scale = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    (outputs, inputs), block = codes.shape, parts.quantization.block
    scales, zeros = _matrix(parts[scale], outputs, inputs, block), None
    if "weight_zero_point" in parts:
        zeros = _matrix(parts["weight_zero_point"], outputs, inputs, block)
    return _checked(parts, codes, scales, zeros, block=block)


def _matrix(
    scales: Tensor, outputs: int, inputs: int, block: tuple[int, int] | None = None
) -> Tensor:
    """[1, 1], [outputs, 1], or the matrix that it is. A row may be of blocks or of outputs."""
    if scales.dim() < 2:
        scales = scales.view(-1, 1)
    of_blocks = block and scales.shape == (-(-outputs // block[0]), -(-inputs // block[1]))
    if scales.shape == (1, outputs) and not of_blocks:
        scales = scales.view(-1, 1)
    return scales.float()


def _packed(parts: QuantizedWeight) -> QuantizedTensor:
    words, shape = parts.words("weight_packed"), parts["weight_shape"].tolist()
    inputs = max(1, shape[-1])
    bits = 32 * words.shape[1] // inputs
    if bits not in PACKED_BITS or [len(words), 32 * words.shape[1]] != [shape[0], bits * inputs]:
        parts.refuse(f"words {list(words.shape)} for a shape of {shape}")
    block = parts.quantization.block
    scales, zeros = _matrix(parts["weight_scale"], len(words), inputs, block), None
    if "weight_zero_point" in parts:
        # The last word of zeros may be longer than the outputs.
        zeros = Packed(parts.words("weight_zero_point"), 0, bits).all()[: len(words)].float()
    else:
        zeros = torch.full_like(scales, 1 << (bits - 1))
    codes = Packed(words, 1, bits)
    return _checked(parts, codes, scales, zeros, order="weight_g_idx", block=block)


def _by_inputs(parts: QuantizedWeight) -> QuantizedTensor:
    """AWQ and GPTQ, which keep weights transposed."""
    quantization, bits = parts.quantization, parts.quantization.bits
    awq = quantization.method == "awq"
    layout = (bits, awq)
    codes = Packed(parts.words("qweight").t(), 0 if awq else 1, *layout)
    scales = parts["scales"].t().float().contiguous()
    if quantization.zeros == "middle":
        zeros = torch.full_like(scales, 1 << (bits - 1))
    else:
        zeros = Packed(parts.words("qzeros").t(), 0, *layout).all().float()
        zeros += quantization.zeros == "less one"
    return _checked(parts, codes, scales, zeros, order="g_idx", group=quantization.group)


def _checked(
    parts: QuantizedWeight,
    codes: Tensor | Packed,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    order: str = "",
    group: int | None = None,
    block: tuple[int, int] | None = None,
) -> QuantizedTensor:
    """order: the part with each input's group, if groups are not of neighbours."""
    outputs, inputs = codes.shape
    high, wide = scales.shape
    rows = _scale_indices(outputs, high, block[0] if block and high not in (1, outputs) else None)
    columns = _scale_indices(inputs, wide, block[1] if block and wide > 1 else group)
    if (int(rows.max()) + 1, int(columns.max()) + 1) != (high, wide):
        parts.refuse(f"scales {list(scales.shape)} for {[outputs, inputs]} weights")
    if order in parts and int(parts[order].min()) >= 0:  # -1 stands for no order
        columns = parts[order].long()
        if columns.shape != (inputs,) or int(columns.max()) >= wide:
            parts.refuse(f"{order} {list(columns.shape)} for {inputs} inputs in {wide} groups")
    if zeros is not None and zeros.shape != scales.shape:
        parts.refuse(f"zero points {list(zeros.shape)} for scales {list(scales.shape)}")
    return QuantizedTensor(codes, scales, zeros, rows, columns)


def _scale_indices(size: int, count: int, each: int | None) -> Tensor:
    """[size], the index of each one's scale among `count`, if `each` neighbours share one."""
    return torch.arange(size) // (each or max(1, size // count))


class _Mxfp4Tensor(NamedTuple):
    """One tensor. Has the interface of an open safetensors file."""

    blocks: OpenFile
    scales: OpenFile

    def get_tensor(self, name: str) -> Tensor:
        blocks, scales = name + BLOCKS, name + SCALES
        return dequantize_mxfp4(
            name, self.blocks.get_tensor(blocks), self.scales.get_tensor(scales)
        )


def _join_blocks(stored: dict[str, OpenFile]) -> dict[str, OpenFile | QuantizedWeight]:
    """Joins blocks in MXFP4 and their scales, which may be in two files."""
    joined: dict[str, OpenFile | QuantizedWeight] = dict(stored)
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        if name + SCALES not in stored:
            raise InvalidCheckpoint(f"tensor {name}{SCALES} is missing from the checkpoint")
        joined[name] = _Mxfp4Tensor(stored[name + BLOCKS], stored[name + SCALES])
        del joined[name + BLOCKS], joined[name + SCALES]
    return joined


def dequantize_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """The tensor `name` in bfloat16, [experts, inputs, outputs], as unquantized checkpoints keep
    it."""
    bytes_only = blocks.dtype == scales.dtype == torch.uint8
    if not bytes_only or blocks.dim() != 4 or blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise InvalidCheckpoint(
            f"tensor {name} is not in MXFP4: blocks {list(blocks.shape)} of {blocks.dtype},"
            f" scales {list(scales.shape)} of {scales.dtype}"
        )
    # An entry for each byte: its two numbers, in 32 bits.
    pairs = torch.tensor([(low, high) for high, low in product(_NUMBERS, repeat=2)])
    table = pairs.bfloat16().view(torch.int32).flatten()
    powers = torch.pow(2.0, scales.float() - 127.0).bfloat16().unsqueeze(3)
    numbers = blocks.new_empty(*scales.shape, 2 * BLOCK_BYTES, dtype=torch.bfloat16)
    for expert, found in enumerate(blocks):
        entries = table.index_select(0, found.flatten().int())
        unscaled = entries.view(torch.bfloat16).view_as(numbers[expert])
        torch.mul(unscaled, powers[expert], out=numbers[expert])
    return numbers.flatten(2).transpose(1, 2)

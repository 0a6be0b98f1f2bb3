"""Parses how a checkpoint keeps quantized weights: the quantization_config of its config.json.

Which weights are quantized is not parsed: a module that `ignore`, `exclude_modules` or
`modules_to_not_convert` names has a plain tensor in the checkpoint, and the others have codes and
scales (engine/quantized_tensor.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.engine.model_config import ModelConfig

Method = Literal["compressed-tensors", "fp8", "awq", "gptq", "mxfp4"]
Zeros = Literal["stored", "less one", "middle"]
"""Zero points are stored, or stored less one, or all in the middle of the codes' range."""

PACKED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are kept. What differs between tensors follows from their shapes."""

    method: Method
    bits: int = 8  # of AWQ's and GPTQ's codes
    zeros: Zeros = "stored"
    group: int | None = None  # inputs that share a scale; None: as the scales' shape says
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale


def parse_quantization(config: ModelConfig, *, interleaved: bool) -> Quantization | None:
    """Parses the quantization that a model's config states. Raises UnsupportedModel.

    interleaved: the model's experts are kept as [inputs, outputs], which only MXFP4 supports.
    """
    if "quantization_config" not in config:
        return None
    stated = config.nested("quantization_config")
    method = stated.get("quant_method", str, "unknown")
    if interleaved and method == "mxfp4":
        return Quantization("mxfp4")
    parse = PARSERS.get(method)
    if interleaved or parse is None:
        supported = "mxfp4" if interleaved else ", ".join(PARSERS)
        _refuse(f"of method {method!r}", f"; supported here: {supported}")
    return parse(stated)


def _compressed_tensors(stated: ModelConfig) -> Quantization:
    """Config groups only give the size of blocks: the rest follows from the tensors' shapes."""
    for key in ("sparsity_config", "transform_config"):
        if stated.nested(key).values.get("format", stated.nested(key).values) not in ({}, "dense"):
            _refuse(f"with a {key}")
    if stated.get("quantization_status", str, "compressed") != "compressed":
        _refuse(f"with status {stated.values['quantization_status']!r}")
    blocks: set[tuple[int, int] | None] = set()
    groups = stated.nested("config_groups")
    for name in groups.values:
        group = groups.nested(name)
        if "weights" not in group:  # only activations, such as those of attention
            continue
        kept_as = group.get("format", str, stated.get("format", str, "unknown"))
        if kept_as not in FORMATS:
            _refuse(f"in format {kept_as!r}")
        blocks.add(_block(group.nested("weights"), kept_as))
    sizes = list(blocks - {None})
    if len(sizes) > 1:
        _refuse("in blocks of several sizes")
    return Quantization("compressed-tensors", block=sizes[0] if sizes else None)


FORMATS: dict[str, set[tuple[str, int]]] = {
    "float-quantized": {("float", 8)},
    "int-quantized": {("int", 4), ("int", 8)},
    "naive-quantized": {("float", 8), ("int", 4), ("int", 8)},
    "pack-quantized": {("int", 4), ("int", 8)},
}
"""Formats of compressed-tensors, with the types and bits of codes."""


def _block(weights: ModelConfig, kept_as: str) -> tuple[int, int] | None:
    """The size of a config group's blocks; None if it has none."""
    kind, bits = weights.get("type", str, "int"), weights.get("num_bits", int, 8)
    if (kind, bits) not in FORMATS[kept_as]:
        _refuse(f"in format {kept_as!r} with {bits} bits ({kind})")
    strategy = weights.get("strategy", str, "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        _refuse(f"with weights by {strategy!r}")
    return _sizes(weights, "block_structure") if strategy == "block" else None


def _fp8(stated: ModelConfig) -> Quantization:
    if stated.get("expert_dtype", str, "fp8") != "fp8":
        _refuse(f"with experts in {stated.values['expert_dtype']}")
    blocks = "weight_block_size" in stated
    return Quantization("fp8", block=_sizes(stated, "weight_block_size") if blocks else None)


def _modelopt(stated: ModelConfig) -> Quantization:
    algorithm = stated.get("quant_algo", str)
    if algorithm != "FP8":
        _refuse(f"of modelopt in {algorithm}", ", only FP8")
    return Quantization("fp8")


def _awq(stated: ModelConfig) -> Quantization:
    layout = stated.get("version", str, stated.get("format", str, "gemm")).lower()
    if layout != "gemm":
        _refuse(f"of AWQ in layout {layout!r}")
    bits = stated.get("bits", int, stated.get("w_bit", int, 4))
    if bits != 4:
        _refuse(f"of AWQ with {bits} bits")
    zeros: Zeros = "stored" if stated.get("zero_point", bool, True) else "middle"
    return Quantization("awq", bits, zeros, _group(stated))


def _gptq(stated: ModelConfig) -> Quantization:
    """Zero points of symmetric weights are not read: some quantizers claim to store them less one
    and do not."""
    layout = stated.get("checkpoint_format", str, stated.get("format", str, "gptq"))
    if layout not in ("gptq", "gptq_v2"):
        _refuse(f"of GPTQ in layout {layout!r}")
    bits = stated.get("bits", int)
    if bits not in PACKED_BITS:
        _refuse(f"of GPTQ with {bits} bits")
    if any(not pattern.startswith("-") for pattern in stated.nested("dynamic").values):
        _refuse("of GPTQ with settings by module ('dynamic')")
    zeros: Zeros = "less one" if layout == "gptq" else "stored"
    return Quantization(
        "gptq", bits, "middle" if stated.get("sym", bool, True) else zeros, _group(stated)
    )


PARSERS = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
}


def _group(stated: ModelConfig) -> int | None:
    """Returns None for one group of all inputs, whose `group_size` is -1."""
    size = stated.values.get("group_size", 128)
    if size in (-1, 0, None):
        return None
    return stated.get("group_size", int, 128)


def _sizes(stated: ModelConfig, key: str) -> tuple[int, int]:
    sizes = stated.get(key, list)
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise InvalidConfig(f"{key} must be two whole numbers above 0, not {sizes}", field=key)
    return sizes[0], sizes[1]


def _refuse(what: str, more: str = "") -> NoReturn:
    raise UnsupportedModel(f"quantized weights {what} are not supported{more}")

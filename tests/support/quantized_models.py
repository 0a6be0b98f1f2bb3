"""Tiny models in the formats of published quantized checkpoints.

Codes and scales are random; what they stand for is computed here, before they are packed, as each
format's definition says. So are the packed words, one code after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, TinyModel, change_config, save
from torch import Generator, Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

GROUP = 8
BLOCK = (32, 16)  # outputs and inputs; neither divides all sizes of these models

PLAIN = "model.layers.1.self_attn.o_proj"
"""The module that every such checkpoint leaves unquantized."""

Parts = dict[str, Tensor]
Quantize = Callable[[str, int, int, Generator], tuple[Parts, Tensor]]
"""Of a module's name, outputs and inputs: the stored parts, and the numbers they stand for."""


@dataclass(frozen=True)
class QuantizedFormat:
    """A format: its quantization_config, and one weight in it."""

    config: dict[str, object]
    quantize: Quantize


def pack(codes: Tensor, bits: int, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """codes [rows, columns] -> words [rows, columns * bits / 32]; the code at place p of each word
    has the p-th lowest bits, where `places` are those of neighbours."""
    each = 32 // bits
    words = torch.zeros(len(codes), codes.shape[1] // each, dtype=torch.int64)
    for neighbour in range(each):
        words |= codes[:, neighbour::each].long() << (bits * places[neighbour])
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def _integers(low: int, high: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def _scales(shape: tuple[int, ...], size: float, generator: Generator) -> Tensor:
    return size * (0.5 + torch.rand(shape, generator=generator))


def _product(codes: Tensor, zeros: Tensor | int, scales: Tensor) -> Tensor:
    return ((codes.double() - zeros) * scales.double()).float()


def _bytes(
    dtype: torch.dtype,
    by: str,
    scale: str = "weight_scale",
    *,
    asymmetric: bool = False,
    static: bool = False,
) -> Quantize:
    def quantize(_: str, outputs: int, inputs: int, generator: Generator) -> tuple[Parts, Tensor]:
        if dtype == torch.int8:
            codes, size = _integers(-128, 128, (outputs, inputs), generator).to(dtype), 0.004
        else:
            codes, size = torch.randn(outputs, inputs, generator=generator).to(dtype), 0.3
        high, wide = -(-outputs // BLOCK[0]), -(-inputs // BLOCK[1])
        shape = {"scalar": (), "tensor": (1,), "channel": (outputs, 1), "block": (high, wide)}[by]
        scales = _scales(shape, size, generator).to(
            torch.float32 if scale == "weight_scale_inv" else torch.bfloat16
        )
        spread = scales
        if by == "block":
            spread = scales.repeat_interleave(BLOCK[0], 0)[:outputs]
            spread = spread.repeat_interleave(BLOCK[1], 1)[:, :inputs]
        parts, zeros = {"weight": codes, scale: scales}, torch.zeros(1)
        if asymmetric:
            zeros = parts["weight_zero_point"] = _integers(-40, 40, shape, generator).to(torch.int8)
        if static:
            parts["input_scale"] = torch.ones(1)
        return parts, _product(codes.float(), zeros.double(), spread)

    return quantize


def _packed(
    bits: int, by: str, group: int, *, asymmetric: bool = False, act_order: bool = False
) -> Quantize:
    """As compressed-tensors packs: codes plus the half of their range."""

    def quantize(_: str, outputs: int, inputs: int, generator: Generator) -> tuple[Parts, Tensor]:
        high, middle = outputs, 1 << (bits - 1)
        wide = inputs // group if by == "group" else 1
        groups = torch.arange(inputs) * wide // inputs
        rows = torch.arange(outputs)
        if by == "block":
            high, wide = -(-outputs // BLOCK[0]), -(-inputs // BLOCK[1])
            rows, groups = rows // BLOCK[0], torch.arange(inputs) // BLOCK[1]
        codes = _integers(-middle, middle, (outputs, inputs), generator)
        scales = _scales((high, wide), 0.6 / middle, generator).bfloat16()
        parts = {
            "weight_packed": pack(codes + middle, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        zeros = torch.zeros(outputs, wide, dtype=torch.int64)
        if asymmetric:
            zeros = _integers(-middle // 4, middle // 4, (outputs, wide), generator)
            parts["weight_zero_point"] = pack((zeros + middle).t(), bits).t().contiguous()
        if act_order:
            groups = groups[torch.randperm(inputs, generator=generator)]
            parts["weight_g_idx"] = groups.int()
        return parts, _product(codes, zeros[:, groups], scales[rows][:, groups])

    return quantize


def _by_inputs(
    bits: int,
    group: int,
    places: tuple[int, ...] = tuple(range(8)),
    *,
    awq: bool = False,
    stored_zeros: int = 0,
    symmetric: bool = False,
    act_order: bool = False,
) -> Quantize:
    """As AWQ and GPTQ pack: codes [inputs, outputs], zeros `stored_zeros` more than they are."""

    def quantize(_: str, outputs: int, inputs: int, generator: Generator) -> tuple[Parts, Tensor]:
        wide, middle = inputs // group, 1 << (bits - 1)
        codes = _integers(0, 2 * middle, (inputs, outputs), generator)
        scales = _scales((wide, outputs), 0.6 / middle, generator).half()
        zeros = _integers(1, 2 * middle, (wide, outputs), generator)
        if symmetric:
            zeros = torch.full_like(zeros, middle)
        groups = torch.arange(inputs) // group
        if act_order:
            groups = groups[torch.randperm(inputs, generator=generator)]
        parts = {
            "qweight": pack(codes, bits, places) if awq else pack(codes.t(), bits).t().contiguous(),
            "qzeros": pack(zeros + stored_zeros, bits, places),
            "scales": scales,
        }
        if not awq:
            parts["g_idx"] = groups.int()
        return parts, _product(codes, zeros[groups], scales[groups]).t().contiguous()

    return quantize


def _compressed(kept_as: str, weights: dict[str, object], **more: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": kept_as,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", f"re:.*{PLAIN.removeprefix('model.')}"],
    }


def _other(method: str, **more: object) -> dict[str, object]:
    return {"quant_method": method, "modules_to_not_convert": [PLAIN], **more}


def _fp8(by: str) -> dict[str, object]:
    return {"num_bits": 8, "type": "float", "strategy": by}


def _int(bits: int, by: str, **more: object) -> dict[str, object]:
    return {"num_bits": bits, "type": "int", "strategy": by, **more}


def _mixed(size: int) -> QuantizedFormat:
    attention, rest = _bytes(torch.float8_e4m3fn, "channel"), _packed(4, "group", size)

    def quantize(name: str, *more: int | Generator) -> tuple[Parts, Tensor]:
        return (attention if "self_attn" in name else rest)(name, *more)  # type: ignore[arg-type]

    config = _compressed("mixed-precision", {})
    config["config_groups"] = {
        "group_0": {
            "targets": ["re:.*self_attn.*"],
            "weights": _fp8("channel"),
            "format": "float-quantized",
        },
        "group_1": {
            "targets": ["re:.*mlp.*"],
            "weights": _int(4, "group", group_size=size),
            "format": "pack-quantized",
        },
    }
    return QuantizedFormat(config, quantize)


_E4M3 = torch.float8_e4m3fn
_STATIC = {"input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}
_DYNAMIC = {"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}}


def formats(size: int) -> dict[str, QuantizedFormat]:
    """With groups of that many inputs."""
    groups: dict[str, object] = {"group_size": size}
    gptq: dict[str, object] = {"bits": 4, **groups}
    return {
        "fp8-one-scale-static": QuantizedFormat(
            _compressed("float-quantized", _fp8("tensor"), **_STATIC),
            _bytes(_E4M3, "tensor", static=True),
        ),
        "fp8-by-channel": QuantizedFormat(
            _compressed("float-quantized", _fp8("channel"), **_DYNAMIC), _bytes(_E4M3, "channel")
        ),
        "fp8-by-block": QuantizedFormat(
            _compressed("float-quantized", {**_fp8("block"), "block_structure": list(BLOCK)}),
            _bytes(_E4M3, "block"),
        ),
        "int8": QuantizedFormat(
            _compressed("int-quantized", _int(8, "channel"), **_DYNAMIC),
            _bytes(torch.int8, "channel"),
        ),
        "int8-asymmetric": QuantizedFormat(
            _compressed("int-quantized", _int(8, "channel", symmetric=False), **_DYNAMIC),
            _bytes(torch.int8, "channel", asymmetric=True),
        ),
        "int4": QuantizedFormat(
            _compressed("pack-quantized", _int(4, "group", **groups)), _packed(4, "group", size)
        ),
        "int4-asymmetric": QuantizedFormat(
            _compressed("pack-quantized", _int(4, "group", symmetric=False, **groups)),
            _packed(4, "group", size, asymmetric=True),
        ),
        "int4-act-order": QuantizedFormat(
            _compressed("pack-quantized", _int(4, "group", actorder="group", **groups)),
            _packed(4, "group", size, act_order=True),
        ),
        "int8-packed": QuantizedFormat(
            _compressed("pack-quantized", _int(8, "channel")), _packed(8, "channel", size)
        ),
        "int4-by-block": QuantizedFormat(
            _compressed("pack-quantized", {**_int(4, "block"), "block_structure": list(BLOCK)}),
            _packed(4, "block", size),
        ),
        "mixed": _mixed(size),
        "fp8": QuantizedFormat(
            _other("fp8", weight_block_size=list(BLOCK), fmt="e4m3", activation_scheme="dynamic"),
            _bytes(_E4M3, "block", "weight_scale_inv"),
        ),
        "fp8-static": QuantizedFormat(
            _other("fp8", activation_scheme="static"), _bytes(_E4M3, "tensor", static=True)
        ),
        "modelopt": QuantizedFormat(
            _other("modelopt", quant_algo="FP8", kv_cache_quant_algo="FP8", ignore=["lm_head"]),
            _bytes(_E4M3, "scalar", static=True),
        ),
        "awq": QuantizedFormat(
            _other("awq", version="gemm", zero_point=True, **gptq),
            _by_inputs(4, size, AWQ_PLACES, awq=True),
        ),
        "gptq": QuantizedFormat(
            _other("gptq", sym=True, desc_act=False, **gptq),
            _by_inputs(4, size, stored_zeros=-1, symmetric=True),
        ),
        "gptq-symmetric-v2-zeros": QuantizedFormat(
            _other("gptq", sym=True, desc_act=False, **gptq), _by_inputs(4, size, symmetric=True)
        ),
        "gptq-asymmetric-act-order": QuantizedFormat(
            _other("gptq", sym=False, desc_act=True, checkpoint_format="gptq", **gptq),
            _by_inputs(4, size, stored_zeros=-1, act_order=True),
        ),
        "gptq-v2": QuantizedFormat(
            _other("gptq", sym=False, desc_act=False, checkpoint_format="gptq_v2", **gptq),
            _by_inputs(4, size),
        ),
        "gptq-8-bits": QuantizedFormat(
            _other("gptq", sym=False, desc_act=True, bits=8, **groups),
            _by_inputs(8, size, stored_zeros=-1, act_order=True),
        ),
    }


FORMATS = formats(GROUP)


def one_weight(name: str, outputs: int, inputs: int, seed: int = 0) -> tuple[Parts, Tensor]:
    """One weight in the format `name`: its parts, and the numbers they stand for."""
    generator = Generator().manual_seed(seed)
    return FORMATS[name].quantize("model.layers.0.mlp.up_proj", outputs, inputs, generator)


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Of a checkpoint's tensors, all matrices in layers but routers and the module PLAIN."""
    router = name.endswith((".gate.weight", "shared_expert_gate.weight"))
    return "layers." in name and tensor.dim() == 2 and not router and not name.startswith(PLAIN)


def save_quantized(
    name: str, folder: Path, model: TinyModel | None = None, group: int = GROUP
) -> PreTrainedModel:
    """Writes the folder of a tiny model in the format `name`, in two files; returns the model with
    the numbers that the codes stand for."""
    plain, form = folder / "plain", formats(group)[name]
    save(model or TINY_MODELS["llama"].changed(num_key_value_heads=2), plain)
    tensors, generator = load_file(plain / "model.safetensors"), Generator().manual_seed(0)
    stored: list[Parts] = [{}, {}]
    for index, (key, tensor) in enumerate(sorted(tensors.items())):
        if not is_quantized(key, tensor):
            stored[0][key] = tensor
            continue
        module = key.removesuffix(".weight")
        parts, tensors[key] = form.quantize(module, *tensor.shape, generator)
        for place, (part, held) in enumerate(parts.items()):
            stored[(place + index) % 2][f"{module}.{part}"] = held
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    files = [f"model-{file}.safetensors" for file in (1, 2)]
    for file, held in zip(files, stored, strict=True):
        save_file(held, folder / file, metadata={"format": "pt"})
    names = {key: file for file, held in zip(files, stored, strict=True) for key in held}
    index_file = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    (folder / "config.json").write_text((plain / "config.json").read_text())
    change_config(folder, quantization_config=form.config)
    return AutoModelForCausalLM.from_pretrained(plain)

"""The model in a GGUF file, as a Hugging Face folder has it: its config.json, and its weights.

GGUF and Hugging Face differ in names, and in the rows of query and key projections: GGUF has each
rotary pair adjacent for Llama's relatives, Hugging Face has the two halves of a head one after the
other. A file that asks for what has no counterpart here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.core.errors import InvalidCheckpoint, UnsupportedModel
from baton.core.gguf_file import GgufFile, Values

Json = dict[str, object]

ADJACENT_PAIRS = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": True}
"""The supported architectures, which have the same names as Hugging Face's model types, and
whether rotary pairs are adjacent rows."""

ROPE_FACTORS = "rope_freqs.weight"
"""Divides the rotary frequencies; only Llama 3.1 and later have it."""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_UNKNOWN_FIELDS = ("expert_count", "attention.sliding_window", "rope.scale_linear")
"""What some files of a supported architecture ask for, and is not served from GGUF."""

# Of every Llama 3.1, 3.2 and 3.3; the file has the factors alone.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufWeights:
    """The weights of a model's parts, by their Hugging Face names."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._file = GgufFile(paths)
        architecture = supported_architecture(self._file)
        self._heads: dict[str, int] = {}  # of projections whose rotary pairs are adjacent
        if ADJACENT_PAIRS[architecture]:
            shape = _Shape.of(self._file)
            self._heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
        self._names = {
            weight_name(name): name for name in self._file.tensors if name != ROPE_FACTORS
        }

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def __getitem__(self, name: str) -> Values:
        found = self._names[name]
        values = self._file.tensor(found)
        heads = self._heads.get(found.split(".")[-2])
        return _split_halves(values, heads) if heads else values


@dataclass(frozen=True, slots=True)
class _Shape:
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, file: GgufFile) -> _Shape:
        prefix = supported_architecture(file)
        heads = file.field(f"{prefix}.attention.head_count", int)
        kv_heads = file.field(f"{prefix}.attention.head_count_kv", int, heads)
        dim = file.field(f"{prefix}.embedding_length", int) // max(heads, 1)
        return cls(heads, kv_heads, file.field(f"{prefix}.attention.key_length", int, dim))


def supported_architecture(file: GgufFile) -> str:
    name = file.field("general.architecture", str)
    if name not in ADJACENT_PAIRS:
        raise UnsupportedModel(
            f"GGUF architecture {name!r} is not supported; supported: {', '.join(ADJACENT_PAIRS)}"
        )
    return name


def weight_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, as "blk.7.attn_q.weight"."""
    match name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}"
        case _ if name in _OUTER_TENSORS:
            return _OUTER_TENSORS[name]
    raise UnsupportedModel(f"GGUF tensor {name!r} is not of a supported model")


def model_config(file: GgufFile) -> Json:
    """The content of config.json."""
    prefix, shape, tensors = supported_architecture(file), _Shape.of(file), file.tensors
    for name in _UNKNOWN_FIELDS:
        if file.field(f"{prefix}.{name}", int, 0):
            raise UnsupportedModel(f"GGUF field {prefix}.{name} is not supported")
    for name in tensors.keys() - {ROPE_FACTORS}:
        weight_name(name)
    if file.field(f"{prefix}.rope.dimension_count", int, shape.head_dim) != shape.head_dim:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    return {
        "model_type": prefix,
        "hidden_act": "silu",
        "hidden_size": file.field(f"{prefix}.embedding_length", int),
        "intermediate_size": file.field(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": file.field(f"{prefix}.block_count", int),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": file.field(f"{prefix}.context_length", int),
        "vocab_size": vocabulary_size(file),
        "rms_norm_eps": _decimal(file, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, prefix, shape.head_dim),
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def vocabulary_size(file: GgufFile) -> int:
    """The number of token ids; the tokenizer may use fewer."""
    shape = file.tensors.get("token_embd.weight")
    if shape is None:
        raise InvalidCheckpoint("the GGUF file has no tensor token_embd.weight")
    return shape[0]


def _rope(file: GgufFile, prefix: str, head_dim: int) -> Json:
    theta = _decimal(file, f"{prefix}.rope.freq_base", 10_000.0)
    kind = file.field(f"{prefix}.rope.scaling.type", str, "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file.tensor(ROPE_FACTORS), theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn") or f"{prefix}.rope.scaling.attn_factor" in file:
        raise UnsupportedModel(f"GGUF RoPE scaling {kind!r} is not supported")
    scaling = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": _decimal(file, f"{prefix}.rope.scaling.factor"),
    }
    if kind == "yarn":
        original = f"{prefix}.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = file.field(original, int)
    return scaling


def _llama3_rope(factors: Values, theta: float, head_dim: int) -> Json:
    """Llama 3's parameters, if the factors are what they give."""
    factor = round(float(factors.max()), 4)
    low, high, context = _LLAMA3_ROPE.values()
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # Long waves are slowed down by the factor, short ones not at all.
    share = np.clip((context / waves - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - share) / factor + share)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModel(f"the factors in GGUF tensor {ROPE_FACTORS} are not Llama 3's")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_ROPE}


def _decimal(file: GgufFile, name: str, default: float | None = None) -> float:
    """Stored as float32: the shortest decimal that rounds to it is meant."""
    return float(str(np.float32(file.field(name, float, default))))


def _split_halves(values: Values, heads: int) -> Values:
    """values: [heads * dim, …]; each head's rows x0 y0 x1 y1 … become x0 x1 … y0 y1 …"""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

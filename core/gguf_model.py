"""Converts a GGUF file's model to Hugging Face's form: its config.json, and its weights.

GGUF and Hugging Face differ in names, in the offset of norms' weights, in experts, which are one
tensor in a GGUF file, and in the rows of query and key projections: for Llama's relatives, GGUF has
each rotary pair adjacent, Hugging Face has the two halves of a head one after the other. A file
with a feature that has no counterpart here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.core.errors import InvalidCheckpoint, UnsupportedModel
from baton.core.gguf_architectures import (
    EXPERT,
    ROPE_TENSORS,
    GgufArchitecture,
    Json,
    architecture_of,
)
from baton.core.gguf_file import GgufFile, Values

# The same for every Llama 3.1, 3.2 and 3.3; the file has only the factors.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LOCAL_ROPE_BASE = 10_000.0
_ORIGINAL = "rope.scaling.original_context_length"


class GgufWeights:
    """The weights in a model's files, by their Hugging Face names."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._file = GgufFile(paths)
        self._architecture = architecture_of(self._file)
        self._heads: dict[str, int] = {}  # of projections whose rotary pairs are adjacent
        if self._architecture.adjacent_pairs:
            shape = _Shape.of(self._file)
            self._heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
        self._names: dict[str, tuple[str, int | None]] = {}  # (tensor, expert in it)
        for tensor, (count, *_) in self._file.tensors.items():
            if tensor not in ROPE_TENSORS:
                self._add_names(tensor, count)

    def _add_names(self, tensor: str, count: int) -> None:
        name = self._architecture.weight_name(tensor)
        if EXPERT not in name:
            self._names[name] = (tensor, None)
            return
        for expert in range(count):
            self._names[name.replace(EXPERT, str(expert))] = (tensor, expert)

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def __getitem__(self, name: str) -> Values:
        tensor, expert = self._names[name]
        values, part = self._file.tensor(tensor, expert), tensor.split(".")[-2]
        if part.endswith("norm") and self._architecture.norm_offset:
            return values - np.float32(self._architecture.norm_offset)
        if part == "ffn_gate_inp_shexp":
            return values.reshape(1, -1)
        heads = self._heads.get(part)
        return _split_halves(values, heads) if heads else values

    def inputs(self, name: str) -> int:
        return self._file.tensors[self._names[name][0]][-1]

    def grid(self, name: str) -> tuple[Values, Values] | None:
        """The scales and offsets of a weight's codes; None if it has none."""
        tensor, expert = self._names[name]
        found, heads = self._file.grid(tensor, expert), self._heads.get(tensor.split(".")[-2])
        if found is None or heads is None:
            return found
        return _split_halves(found[0], heads), _split_halves(found[1], heads)


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, file: GgufFile) -> _Shape:
        prefix = file.field("general.architecture", str)
        hidden = file.field(f"{prefix}.embedding_length", int)
        heads = file.field(f"{prefix}.attention.head_count", int)
        kv_heads = file.field(f"{prefix}.attention.head_count_kv", int, heads)
        dim = file.field(f"{prefix}.attention.key_length", int, hidden // max(heads, 1))
        return cls(hidden, heads, kv_heads, dim)


def model_config(file: GgufFile) -> Json:
    """The content of config.json."""
    architecture, shape, tensors = architecture_of(file), _Shape.of(file), file.tensors
    prefix = file.field("general.architecture", str)
    for name in tensors.keys() - set(ROPE_TENSORS):
        architecture.weight_name(name)
    return {
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": file.field(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": file.field(f"{prefix}.block_count", int),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": file.field(f"{prefix}.context_length", int),
        # If the family has a default for it, as Phi-3 does, it takes precedence over RoPE's own.
        "original_max_position_embeddings": file.field(f"{prefix}.{_ORIGINAL}", int, 0) or None,
        "vocab_size": vocabulary_size(file),
        "rms_norm_eps": _decimal(file, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file, prefix, architecture, shape.head_dim),
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        **architecture.stated,
        **_own_fields(file, prefix, architecture),
        **_score_scale(file, prefix, architecture, shape),
    }


def _own_fields(file: GgufFile, prefix: str, architecture: GgufArchitecture) -> Json:
    """The keys from the architecture's own fields. 0 means unset."""
    found: Json = {
        key: file.field(f"{prefix}.{name}", int, 0) or None
        for name, key in architecture.counts.items()
        if f"{prefix}.{name}" in file
    }
    for name, key in architecture.decimals.items():
        if f"{prefix}.{name}" in file:
            found[key] = _decimal(file, f"{prefix}.{name}") or None
    return found


def _score_scale(
    file: GgufFile, prefix: str, architecture: GgufArchitecture, shape: _Shape
) -> Json:
    """Gemma's score scale, which the file lacks: its largest models are recognized by the number of
    their layers."""
    if architecture.wide_layers is None:
        return {}
    wide = file.field(f"{prefix}.block_count", int) == architecture.wide_layers
    return {"query_pre_attn_scalar": shape.hidden // shape.heads if wide else shape.head_dim}


def vocabulary_size(file: GgufFile) -> int:
    """The number of token ids; the tokenizer may use fewer."""
    shape = file.tensors.get("token_embd.weight")
    if shape is None:
        raise InvalidCheckpoint("the GGUF file has no tensor token_embd.weight")
    return shape[0]


def _rope_parameters(
    file: GgufFile, prefix: str, architecture: GgufArchitecture, head_dim: int
) -> Json:
    rotated = file.field(f"{prefix}.rope.dimension_count", int, head_dim)
    if rotated != head_dim and not architecture.partial_rotary:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    rope = _rope(file, prefix, head_dim)
    if architecture.local_rope:
        base = _decimal(file, f"{prefix}.rope.freq_base_swa", _LOCAL_ROPE_BASE)
        return {"full_attention": rope, "sliding_attention": {"rope_theta": base}}
    return rope if rotated == head_dim else {**rope, "partial_rotary_factor": rotated / head_dim}


def _rope(file: GgufFile, prefix: str, head_dim: int) -> Json:
    theta = _decimal(file, f"{prefix}.rope.freq_base", 10_000.0)
    factor, attention = f"{prefix}.rope.scaling.factor", f"{prefix}.rope.scaling.attn_factor"
    usual = "linear" if file.field(factor, float, 0.0) else "none"
    kind = file.field(f"{prefix}.rope.scaling.type", str, usual)
    llama3, long, short = (
        file.tensor(name) if name in file.tensors else None for name in ROPE_TENSORS
    )
    original = f"{prefix}.{_ORIGINAL}"
    if long is not None and short is not None:
        found: Json = {
            "rope_type": "longrope",
            "rope_theta": theta,
            "long_factor": [float(str(each)) for each in long],
            "short_factor": [float(str(each)) for each in short],
            "original_max_position_embeddings": file.field(original, int),
        }
        return found | (
            {"attention_factor": _decimal(file, attention)} if attention in file else {}
        )
    if file.field(attention, float, 1.0) != 1.0:
        raise UnsupportedModel(f"GGUF field {attention} is not supported")
    if llama3 is not None:
        return _llama3_rope(llama3, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"GGUF RoPE scaling {kind!r} is not supported")
    scaling = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": _decimal(file, factor),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.field(original, int)
        for name in ("beta_fast", "beta_slow"):
            if f"{prefix}.rope.scaling.yarn_{name}" in file:
                scaling[name] = _decimal(file, f"{prefix}.rope.scaling.yarn_{name}")
    return scaling


def _llama3_rope(factors: Values, theta: float, head_dim: int) -> Json:
    """Llama 3's parameters. Raises UnsupportedModel if they do not yield the factors."""
    factor = round(float(factors.max()), 4)
    low, high, context = _LLAMA3_ROPE.values()
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # Long waves are slowed down by the factor, short ones not at all.
    share = np.clip((context / waves - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - share) / factor + share)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModel(f"the factors in GGUF tensor {ROPE_TENSORS[0]} are not Llama 3's")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_ROPE}


def _decimal(file: GgufFile, name: str, default: float | None = None) -> float:
    """A field in float32, as the shortest decimal that rounds to it."""
    return float(str(np.float32(file.field(name, float, default))))


def _split_halves(values: Values, heads: int) -> Values:
    """values: [heads * dim, …]; each head's rows x0 y0 x1 y1 … become x0 x1 … y0 y1 …"""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

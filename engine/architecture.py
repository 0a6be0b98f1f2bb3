"""What a model is, parsed from its config.json.

A config that asks for what Baton does not run is refused, never approximated. Code that ships
with a model is never run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.engine.model_config import Family, ModelConfig, read_config

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)

HARMLESS: dict[str, tuple[object, ...]] = {
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "attention_chunk_size": (None,),
    "num_kv_shared_layers": (0, None),
    "per_layer_config": ({}, None),
    "transformers_weights": (None,),
}
"""Keys that transformers obeys in any family, with the values that ask for nothing. Other keys
that a family does not know have no effect there either."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions rotate queries and keys. Fields that a kind does not use are neutral."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a model. `windows` and `rotates` have one entry per layer."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    context_length: int
    norm_epsilon: float
    rope: Rope
    windows: tuple[int | None, ...]  # a token sees itself and window - 1 tokens before it
    rotates: tuple[bool, ...]
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool


def read_architecture(folder: Path) -> Architecture:
    """The architecture of the model in `folder`, or UnsupportedModel."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(f"{folder} holds an adapter, which is not supported; merge it first")
    return parse_architecture(folder / "config.json")


def parse_architecture(path: Path) -> Architecture:
    """The architecture that a Hugging Face config file describes, or UnsupportedModel."""
    name, family, config = read_config(path)
    _refuse_what_we_cannot_run(config)
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    context_length = config.get("max_position_embeddings", int)
    rope = _rope(config, context_length)
    rotates = _rotates(config, family)
    attention_bias = config.get("attention_bias", bool)
    architecture = Architecture(
        family=name,
        layers=len(rotates),
        hidden=hidden,
        intermediate=config.get("intermediate_size", int),
        heads=heads,
        kv_heads=config.get("num_key_value_heads", int, heads),
        head_dim=config.get("head_dim", int, hidden // max(heads, 1)),
        vocabulary_size=config.get("vocab_size", int),
        context_length=_extended_context(rope, context_length),
        norm_epsilon=config.get("rms_norm_eps", float),
        rope=rope,
        windows=_windows(config, family, rotates),
        rotates=rotates,
        tied_embeddings=config.get("tie_word_embeddings", bool),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", bool),
        query_key_norm=family.query_key_norm,
    )
    _check_shape(architecture)
    return architecture


def _refuse_what_we_cannot_run(config: ModelConfig) -> None:
    if "quantization_config" in config:
        method = config.nested("quantization_config").get("quant_method", str, "unknown")
        raise UnsupportedModel(f"quantized checkpoints are not supported (method {method!r})")
    activation = config.get("hidden_act", str)
    if activation != "silu":
        raise UnsupportedModel(f"activation {activation!r} is not supported; supported: silu")
    for key, harmless in HARMLESS.items():
        value = config.values.get(key)
        if value not in harmless:
            raise UnsupportedModel(f"config.json: {key} {json.dumps(value)} is not supported")


def _rope(config: ModelConfig, context_length: int) -> Rope:
    scaling = config.nested("rope_scaling")
    if not scaling.values:
        scaling = config.nested("rope_parameters")
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise UnsupportedModel("RoPE parameters that differ between layers are not supported")
    if max(abs(1.0 - each.get("partial_rotary_factor", float, 1.0)) for each in (config, scaling)):
        raise UnsupportedModel("partial rotary embeddings are not supported")
    theta = scaling.get("rope_theta", float, config.get("rope_theta", float))
    name = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    kind = next((kind for kind in ROPE_KINDS if kind == name), None)
    if kind is None:
        raise UnsupportedModel(
            f"RoPE scaling {name!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return Rope(kind, theta)
    if kind == "linear":
        return Rope(kind, theta, factor=scaling.get("factor", float))
    original = scaling.get("original_max_position_embeddings", int, context_length)
    original = config.get("original_max_position_embeddings", int, original)
    if kind == "llama3":
        return Rope(
            kind,
            theta,
            factor=scaling.get("factor", float),
            original_context=original,
            low_frequency_factor=scaling.get("low_freq_factor", float),
            high_frequency_factor=scaling.get("high_freq_factor", float),
        )
    return _yarn(scaling, theta, original, context_length)


def _yarn(scaling: ModelConfig, theta: float, original: int, context_length: int) -> Rope:
    factor = scaling.get("factor", float, context_length / original)
    return Rope(
        "yarn",
        theta,
        factor=factor,
        original_context=original,
        beta_fast=scaling.get("beta_fast", float, 32.0) or 32.0,
        beta_slow=scaling.get("beta_slow", float, 1.0) or 1.0,
        truncate=scaling.get("truncate", bool, True),
        attention_factor=scaling.get("attention_factor", float, _yarn_attention(scaling, factor)),
    )


def _yarn_attention(scaling: ModelConfig, factor: float) -> float:
    """YaRN's default correction of the attention temperature."""

    def correction(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    numerator = scaling.get("mscale", float, 0.0)
    denominator = scaling.get("mscale_all_dim", float, 0.0)
    if numerator and denominator:
        return correction(numerator) / correction(denominator)
    return correction(1.0)


def _extended_context(rope: Rope, context_length: int) -> int:
    """YaRN configs often state the context before scaling."""
    if rope.kind != "yarn":
        return context_length
    return max(context_length, int(rope.original_context * rope.factor))


def _rotates(config: ModelConfig, family: Family) -> tuple[bool, ...]:
    layers = config.get("num_hidden_layers", int)
    if not family.skips_rotation:
        return (True,) * layers
    stated = config.get("no_rope_layers", list, [])
    if stated:
        if len(stated) < layers:
            raise InvalidConfig(f"no_rope_layers names {len(stated)} of {layers} layers")
        return tuple(bool(rotates) for rotates in stated[:layers])
    interval = config.get("no_rope_layer_interval", int)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _windows(
    config: ModelConfig, family: Family, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    if family.windows == "none":
        return _no_windows(config, len(rotates))
    typed = "layer_types" in config
    if typed and family.windows == "all":
        raise UnsupportedModel("Mistral models whose layers differ are not supported")
    in_use = config.get("use_sliding_window", bool) or (typed and family.windows == "unrotated")
    window = config.get("sliding_window", int) if in_use and "sliding_window" in config else None
    if window == 0:
        raise InvalidConfig("a sliding window of 0 sees nothing", field="sliding_window")
    if typed:
        return _windows_by_type(config.get("layer_types", list), window, len(rotates))
    if family.windows == "unrotated":
        return tuple(None if rotated else window for rotated in rotates)
    first = config.get("max_window_layers", int) if family.windows == "late" else 0
    return tuple(window if layer >= first else None for layer in range(len(rotates)))


def _no_windows(config: ModelConfig, layers: int) -> tuple[None, ...]:
    """transformers masks nothing in such a family, but its cache would drop what the window hides:
    prompts and answers would see different contexts."""
    context = config.get("max_position_embeddings", int)
    if config.get("sliding_window", int, context) < context:
        raise UnsupportedModel("a sliding_window is not supported in models of this type")
    if set(config.get("layer_types", list, [])) - {"full_attention"}:
        raise UnsupportedModel("layer_types are not supported in models of this type")
    return (None,) * layers


def _windows_by_type(
    types: list[object], window: int | None, layers: int
) -> tuple[int | None, ...]:
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"layer types {sorted(map(str, unknown))} are not supported")
    if len(types) != layers:
        raise InvalidConfig(f"layer_types names {len(types)} of {layers} layers")
    if window is None and "sliding_attention" in types:
        raise InvalidConfig("layer_types has sliding layers, but no sliding window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_shape(architecture: Architecture) -> None:
    heads, kv_heads = architecture.heads, architecture.kv_heads
    if not (heads and kv_heads and architecture.layers and architecture.head_dim):
        raise InvalidConfig("a model needs layers, heads, key heads and a head size")
    if heads % kv_heads:
        raise InvalidConfig(f"{heads} heads cannot share {kv_heads} key heads evenly")
    if architecture.head_dim % 2:
        raise InvalidConfig(f"a head size of {architecture.head_dim} cannot be rotated in pairs")


@dataclass(frozen=True, slots=True)
class Split:
    """The share of process `rank` of `size` that run one model.

    cut by outputs   query, key, value, gate, up: a rank computes its own heads and columns
    cut by inputs    output, down: the ranks' products are summed (engine/tensor_parallel.py)
    whole            embeddings and norms, on each rank; the head, on rank 0, which samples

    A rank's pages hold the keys and values of its own heads, under the same page ids on all
    ranks, so rank 0's pool keeps the books for all.
    """

    rank: int = 0
    size: int = 1

    def of(self, whole: Architecture) -> Architecture:
        """What one rank runs. Raises InvalidConfig where a model cannot be split evenly."""
        check_split(whole, self.size)
        return dataclasses.replace(
            whole,
            heads=whole.heads // self.size,
            kv_heads=whole.kv_heads // self.size,
            intermediate=whole.intermediate // self.size,
        )


def check_split(whole: Architecture, size: int) -> None:
    """Raises InvalidConfig when `size` ranks cannot share a model evenly.

    Key heads are not repeated, so there are never more ranks than key heads.
    """
    counts = {
        "key heads": whole.kv_heads,
        "heads": whole.heads,
        "columns of an MLP": whole.intermediate,
    }
    for what, count in counts.items():
        if count % size:
            raise InvalidConfig(
                f"{size} ranks cannot share the model's {count} {what} evenly",
                field="tensor_parallel",
            )

"""What a model is, parsed from its config.json.

Each supported family has one row in FAMILIES: what it always has and what it assumes where
config.json is silent. A config that asks for anything else is refused, never approximated.
Code that ships with a model is never run.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.engine.model_config import ModelConfig

RopeKind = Literal["default", "linear", "llama3", "yarn"]


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


@dataclass(frozen=True, slots=True)
class Family:
    """What a family of models always has, and what its config.json may leave out."""

    class_name: str
    kv_heads: int | None  # None: as many as query heads
    context_length: int
    head_dim: int | None = None  # None: hidden / heads
    theta: float = 10_000.0
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_bias_key: bool = False
    mlp_bias_key: bool = False
    query_key_norm: bool = False
    windows: Literal["none", "all", "late", "unrotated"] = "none"
    skips_rotation: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", None, 2048, attention_bias_key=True, mlp_bias_key=True),
    "mistral": Family("MistralForCausalLM", 8, 131_072, windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", 32, 32_768, qkv_bias=True, windows="late"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        32,
        32_768,
        head_dim=128,
        attention_bias_key=True,
        query_key_norm=True,
        windows="late",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        4,
        32_768,
        theta=2_000_000.0,
        tied_embeddings=True,
        attention_bias_key=True,
        mlp_bias_key=True,
        windows="unrotated",
        skips_rotation=True,
    ),
}

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


def read_architecture(folder: Path) -> Architecture:
    """The architecture of the model in `folder`, or UnsupportedModel."""
    return parse_architecture(folder / "config.json")


def parse_architecture(path: Path) -> Architecture:
    """The architecture that a Hugging Face config file describes, or UnsupportedModel."""
    config = ModelConfig.read(path)
    name = config.text("model_type", "")
    family = _family(config, name)
    _refuse_what_we_cannot_run(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers")
    context_length = config.integer("max_position_embeddings", family.context_length)
    rope = _rope(config, family, context_length)
    rotates = _rotates(config, family, layers)
    attention_bias = family.attention_bias_key and config.flag("attention_bias", False)
    architecture = Architecture(
        family=name,
        layers=layers,
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", _kv_heads(config, family, heads)),
        head_dim=config.integer("head_dim", family.head_dim or hidden // max(heads, 1)),
        vocabulary_size=config.integer("vocab_size"),
        context_length=_extended_context(rope, context_length),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(config, family, rotates),
        rotates=rotates,
        tied_embeddings=config.flag("tie_word_embeddings", family.tied_embeddings),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias_key and config.flag("mlp_bias", False),
        query_key_norm=family.query_key_norm,
    )
    _check_shape(architecture)
    return architecture


def supported() -> str:
    """The supported families, for error messages."""
    return ", ".join(f"{name} ({family.class_name})" for name, family in FAMILIES.items())


def _family(config: ModelConfig, name: str) -> Family:
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(f"model type {name!r} is not supported; supported: {supported()}")
    classes = config.items("architectures")
    if classes and classes != [family.class_name]:
        raise UnsupportedModel(
            f"architecture {classes} of model type {name!r} is not supported; "
            f"supported: {supported()}"
        )
    return family


def _refuse_what_we_cannot_run(config: ModelConfig) -> None:
    if "quantization_config" in config:
        method = config.nested("quantization_config").text("quant_method", "unknown")
        raise UnsupportedModel(f"quantized checkpoints are not supported (method {method!r})")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"activation {activation!r} is not supported; supported: silu")


def _kv_heads(config: ModelConfig, family: Family, heads: int) -> int:
    """Default number of key heads: null means one per query head."""
    if family.kv_heads is None or config.is_null("num_key_value_heads"):
        return heads
    return family.kv_heads


def _rope(config: ModelConfig, family: Family, context_length: int) -> Rope:
    scaling = config.nested("rope_scaling" if "rope_scaling" in config else "rope_parameters")
    if scaling.has_nested():
        raise UnsupportedModel("RoPE parameters that differ between layers are not supported")
    if max(abs(1.0 - each.number("partial_rotary_factor", 1.0)) for each in (config, scaling)):
        raise UnsupportedModel("partial rotary embeddings are not supported")
    theta = scaling.number("rope_theta", config.number("rope_theta", family.theta))
    name = scaling.text("rope_type", scaling.text("type", "default"))
    kind = next((kind for kind in ROPE_KINDS if kind == name), None)
    if kind is None:
        raise UnsupportedModel(
            f"RoPE scaling {name!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return Rope(kind, theta)
    if kind == "linear":
        return Rope(kind, theta, factor=scaling.number("factor"))
    original = scaling.integer("original_max_position_embeddings", context_length)
    original = config.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        return Rope(
            kind,
            theta,
            factor=scaling.number("factor"),
            original_context=original,
            low_frequency_factor=scaling.number("low_freq_factor"),
            high_frequency_factor=scaling.number("high_freq_factor"),
        )
    return _yarn(scaling, theta, original, context_length)


def _yarn(scaling: ModelConfig, theta: float, original: int, context_length: int) -> Rope:
    factor = scaling.number("factor", context_length / original)
    return Rope(
        "yarn",
        theta,
        factor=factor,
        original_context=original,
        beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
        truncate=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor", _yarn_attention(scaling, factor)),
    )


def _yarn_attention(scaling: ModelConfig, factor: float) -> float:
    """YaRN's default correction of the attention temperature."""

    def correction(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    numerator = scaling.number("mscale", 0.0)
    denominator = scaling.number("mscale_all_dim", 0.0)
    if numerator and denominator:
        return correction(numerator) / correction(denominator)
    return correction(1.0)


def _extended_context(rope: Rope, context_length: int) -> int:
    """YaRN configs often state the context before scaling."""
    if rope.kind != "yarn":
        return context_length
    return max(context_length, int(rope.original_context * rope.factor))


def _rotates(config: ModelConfig, family: Family, layers: int) -> tuple[bool, ...]:
    if not family.skips_rotation:
        return (True,) * layers
    stated = config.items("no_rope_layers")
    if stated:
        if len(stated) < layers:
            raise InvalidConfig(f"no_rope_layers names {len(stated)} of {layers} layers")
        return tuple(bool(rotates) for rotates in stated[:layers])
    interval = config.integer("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _windows(
    config: ModelConfig, family: Family, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * len(rotates)
    if family.windows == "all":
        return (_mistral_window(config),) * len(rotates)
    window = _window(config, family)
    if "layer_types" in config:
        return _windows_by_type(config.items("layer_types"), window, len(rotates))
    if window is None or not config.flag("use_sliding_window", False):
        return (None,) * len(rotates)
    if family.windows == "unrotated":
        return tuple(None if rotated else window for rotated in rotates)
    first = config.integer("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(len(rotates)))


def _mistral_window(config: ModelConfig) -> int | None:
    if "layer_types" in config:
        raise UnsupportedModel("Mistral models whose layers differ are not supported")
    if config.is_null("sliding_window"):
        return None
    return config.integer("sliding_window", 4096)


def _window(config: ModelConfig, family: Family) -> int | None:
    if family.windows == "late" and not config.flag("use_sliding_window", False):
        return None
    if "sliding_window" in config:
        return config.integer("sliding_window")
    null = config.is_null("sliding_window") or family.windows == "unrotated"
    return None if null else 4096


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

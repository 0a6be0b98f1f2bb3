"""What a model is, read from its config.json.

Each supported family has one entry in FAMILIES: what it always has and what it
assumes where its config.json is silent. A config that asks for anything else
is refused, never approximated. Code that ships with a model is never run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.core.errors import InvalidConfig, ModelNotFound, UnsupportedModel

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn queries and keys. Fields that a kind does not use are neutral."""

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
    """The shape of a model. `windows` and `rotates` have one entry a layer."""

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
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    query_key_norm: bool = False
    windows: Literal["none", "all", "late", "unrotated"] = "none"
    skips_rotation: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", None, 2048, reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Family("MistralForCausalLM", 8, 131_072, windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", 32, 32_768, qkv_bias=True, windows="late"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        32,
        32_768,
        head_dim=128,
        reads_attention_bias=True,
        query_key_norm=True,
        windows="late",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        4,
        32_768,
        theta=2_000_000.0,
        tied_embeddings=True,
        reads_attention_bias=True,
        reads_mlp_bias=True,
        windows="unrotated",
        skips_rotation=True,
    ),
}

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


def read_architecture(folder: Path) -> Architecture:
    """The architecture of the model in `folder`, or UnsupportedModel."""
    return parse_architecture(folder / "config.json")


def parse_architecture(config: Path) -> Architecture:
    """The architecture that a Hugging Face config file describes, or UnsupportedModel."""
    settings = read_settings(config)
    name = settings.text("model_type", "")
    family = _family(settings, name)
    _refuse_what_we_cannot_run(settings)
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    layers = settings.integer("num_hidden_layers")
    context_length = settings.integer("max_position_embeddings", family.context_length)
    rope = _rope(settings, family, context_length)
    rotates = _rotates(settings, family, layers)
    attention_bias = family.reads_attention_bias and settings.flag("attention_bias", False)
    architecture = Architecture(
        family=name,
        layers=layers,
        hidden=hidden,
        intermediate=settings.integer("intermediate_size"),
        heads=heads,
        kv_heads=settings.integer("num_key_value_heads", _kv_heads(settings, family, heads)),
        head_dim=settings.integer("head_dim", family.head_dim or hidden // max(heads, 1)),
        vocabulary_size=settings.integer("vocab_size"),
        context_length=_extended_context(rope, context_length),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(settings, family, rotates),
        rotates=rotates,
        tied_embeddings=settings.flag("tie_word_embeddings", family.tied_embeddings),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and settings.flag("mlp_bias", False),
        query_key_norm=family.query_key_norm,
    )
    _check_shape(architecture)
    return architecture


def supported() -> str:
    """The families that can be run, for people."""
    return ", ".join(f"{name} ({family.class_name})" for name, family in FAMILIES.items())


def _family(settings: Settings, name: str) -> Family:
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(f"model type {name!r} is not supported; supported: {supported()}")
    classes = settings.items("architectures")
    if classes and classes != [family.class_name]:
        raise UnsupportedModel(
            f"architecture {classes} of model type {name!r} is not supported; "
            f"supported: {supported()}"
        )
    return family


def _refuse_what_we_cannot_run(settings: Settings) -> None:
    if "quantization_config" in settings:
        method = settings.nested("quantization_config").text("quant_method", "unknown")
        raise UnsupportedModel(f"quantized checkpoints are not supported (method {method!r})")
    activation = settings.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"activation {activation!r} is not supported; supported: silu")


def _kv_heads(settings: Settings, family: Family, heads: int) -> int:
    """The number of key heads where the config does not say: null means one a query head."""
    if family.kv_heads is None or settings.states("num_key_value_heads"):
        return heads
    return family.kv_heads


def _rope(settings: Settings, family: Family, context_length: int) -> Rope:
    scaling = settings.nested("rope_scaling" if "rope_scaling" in settings else "rope_parameters")
    if scaling.has_nested():
        raise UnsupportedModel("RoPE parameters that differ between layers are not supported")
    if max(abs(1.0 - each.number("partial_rotary_factor", 1.0)) for each in (settings, scaling)):
        raise UnsupportedModel("partial rotary embeddings are not supported")
    theta = scaling.number("rope_theta", settings.number("rope_theta", family.theta))
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
    original = settings.integer("original_max_position_embeddings", original)
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


def _yarn(scaling: Settings, theta: float, original: int, context_length: int) -> Rope:
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


def _yarn_attention(scaling: Settings, factor: float) -> float:
    """YaRN's correction of the attention's temperature, where the config does not state it."""

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


def _rotates(settings: Settings, family: Family, layers: int) -> tuple[bool, ...]:
    if not family.skips_rotation:
        return (True,) * layers
    stated = settings.items("no_rope_layers")
    if stated:
        if len(stated) < layers:
            raise InvalidConfig(f"no_rope_layers names {len(stated)} of {layers} layers")
        return tuple(bool(rotates) for rotates in stated[:layers])
    interval = settings.integer("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _windows(
    settings: Settings, family: Family, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * len(rotates)
    if family.windows == "all":
        return (_mistral_window(settings),) * len(rotates)
    window = _window(settings, family)
    if "layer_types" in settings:
        return _windows_by_type(settings.items("layer_types"), window, len(rotates))
    if window is None or not settings.flag("use_sliding_window", False):
        return (None,) * len(rotates)
    if family.windows == "unrotated":
        return tuple(None if rotated else window for rotated in rotates)
    first = settings.integer("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(len(rotates)))


def _mistral_window(settings: Settings) -> int | None:
    if "layer_types" in settings:
        raise UnsupportedModel("Mistral models whose layers differ are not supported")
    if settings.states("sliding_window") and "sliding_window" not in settings:
        return None
    return settings.integer("sliding_window", 4096)


def _window(settings: Settings, family: Family) -> int | None:
    if family.windows == "late" and not settings.flag("use_sliding_window", False):
        return None
    if "sliding_window" in settings:
        return settings.integer("sliding_window")
    stated_as_null = settings.states("sliding_window") or family.windows == "unrotated"
    return None if stated_as_null else 4096


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


class Settings:
    """A JSON object. A value of null counts as absent; a value of the wrong kind raises."""

    def __init__(self, values: dict[str, object], name: str) -> None:
        self._values = values
        self._name = name

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def states(self, key: str) -> bool:
        """Whether `key` is there at all, be it as null."""
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def items(self, key: str) -> list[object]:
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def nested(self, key: str) -> Settings:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return Settings(value, f"{self._name}.{key}")

    def has_nested(self) -> bool:
        return any(isinstance(value, dict) for value in self._values.values())

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise InvalidConfig(f"{self._name} lacks {key!r}", field=key)
        return default

    def _wrong(self, key: str, kind: str, value: object) -> InvalidConfig:
        return InvalidConfig(f"{self._name}: {key!r} must be {kind}, not {value!r}", field=key)


def read_settings(path: Path) -> Settings:
    """The JSON object in the file at `path`."""
    if not path.is_file():
        raise ModelNotFound(f"no model in {path.parent}: it has no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path} does not hold an object")
    return Settings(values, "config.json")


@dataclass(frozen=True, slots=True)
class Split:
    """The share of process number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def of(self, whole: Architecture) -> Architecture:
        """What one rank runs. Raises InvalidConfig where a model cannot be shared evenly."""
        check_split(whole, self.size)
        return dataclasses.replace(
            whole,
            heads=whole.heads // self.size,
            kv_heads=whole.kv_heads // self.size,
            intermediate=whole.intermediate // self.size,
        )


def check_split(whole: Architecture, size: int) -> None:
    """Raises InvalidConfig when `size` ranks cannot share a model evenly.

    Key heads are not repeated: there are never more ranks than key heads.
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

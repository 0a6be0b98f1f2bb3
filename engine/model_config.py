"""Typed access to a model's config.json, completed with what its family assumes.

Each supported family has one row in FAMILIES.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from baton.core.errors import InvalidConfig, ModelNotFound, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes a family of models."""

    class_name: str
    assumed: dict[str, object]  # where config.json is silent
    fixed: dict[str, object] = field(default_factory=dict)  # whatever config.json says
    qkv_bias: bool = False
    query_key_norm: bool = False
    windows: Literal["none", "all", "late", "unrotated"] = "none"
    skips_rotation: bool = False


ASSUMED: dict[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
}
"""By every family."""

FAMILIES = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048}),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": True},
        windows="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
        fixed={"attention_bias": False, "mlp_bias": False},
        qkv_bias=True,
        windows="late",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "head_dim": 128,
        },
        fixed={"mlp_bias": False},
        query_key_norm=True,
        windows="late",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
        windows="unrotated",
        skips_rotation=True,
    ),
}

NULL_MEANS_NONE = ("num_key_value_heads", "sliding_window")
"""Keys whose null is not the same as silence."""


def supported() -> str:
    """The supported families, for error messages."""
    return ", ".join(f"{name} ({family.class_name})" for name, family in FAMILIES.items())


Value = TypeVar("Value")
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class ModelConfig:
    """Typed access to the JSON object of a config.json. null counts as absent."""

    def __init__(self, values: dict[str, object], name: str = "config.json") -> None:
        self.values = values
        self._name = name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """Raises InvalidConfig for a missing value without a default, or a wrong type."""
        value: Any = self.values[key] if key in self else default
        if value is None:
            raise InvalidConfig(f"{self._name} lacks {key!r}", field=key)
        known = isinstance(value, (int, float) if kind is float else kind)
        if not known or isinstance(value, bool) != (kind is bool) or (kind is int and value < 0):
            raise InvalidConfig(
                f"{self._name}: {key!r} must be {_WORDS[kind]}, not {value!r}", field=key
            )
        return cast("Value", float(value) if kind is float else value)

    def nested(self, key: str) -> ModelConfig:
        return ModelConfig(self.get(key, dict, {}), f"{self._name}.{key}")


def read_config(path: Path) -> tuple[str, Family, ModelConfig]:
    """The family's name, the family, and the config with what the family assumes."""
    if not path.is_file():
        raise ModelNotFound(f"no model in {path.parent}: it has no config.json")
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig(f"{path} is not JSON: {error}") from error
    if not isinstance(stated, dict):
        raise InvalidConfig(f"{path} does not hold an object")
    name = ModelConfig(stated).get("model_type", str, "")
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(f"model type {name!r} is not supported; supported: {supported()}")
    classes = ModelConfig(stated).get("architectures", list, [])
    if classes and classes != [family.class_name]:
        raise UnsupportedModel(
            f"architecture {classes} of model type {name!r} is not supported; "
            f"supported: {supported()}"
        )
    said = {
        key: value for key, value in stated.items() if value is not None or key in NULL_MEANS_NONE
    }
    return name, family, ModelConfig({**ASSUMED, **family.assumed, **said, **family.fixed})

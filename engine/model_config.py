"""Typed access to a model's config.json, completed with the values that its family assumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

from baton.core.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from baton.core.model_store import GPTQ_FILE, MODELOPT_FILE, read_json
from baton.engine.families import ASSUMED, FAMILIES, Family

OPTIONAL = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys that only families that assume a value for them obey."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MAX_LAYERS = 10_000
"""Everything that is kept for each layer would take long, and much memory, for more."""

NULL_MEANS_NONE = (
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys whose null differs from an absent key."""


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


def read_stated(path: Path) -> ModelConfig:
    """Reads a config.json, without a family's values."""
    if not path.is_file():
        raise ModelNotFound(f"no model in {path.parent}: it has no config.json")
    values = read_json(path)
    config = ModelConfig(values | _older_quantization(path.parent, values))
    for key in LAYER_COUNTS:
        layers = config.values.get(key)
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise InvalidConfig(f"config.json: {key!r} must be at most {MAX_LAYERS}", field=key)
    return config


def _older_quantization(folder: Path, values: dict[str, object]) -> dict[str, object]:
    """The `quantization_config` that a quantizer wrote under its old key or in a file of its own;
    empty for other models."""
    if values.get("quantization_config"):
        return {}
    modelopt = ModelConfig(read_json(folder / MODELOPT_FILE), MODELOPT_FILE)
    older = {
        "compressed-tensors": ModelConfig(values).nested("compression_config").values,
        "modelopt": modelopt.nested("quantization").values,
        "gptq": read_json(folder / GPTQ_FILE),
    }
    for method, stated in older.items():
        if stated:
            return {"quantization_config": {**stated, "quant_method": method}}
    return {}


def read_config(path: Path) -> tuple[str, Family, ModelConfig]:
    """Returns the family's name, the family, and the config with the family's values."""
    stated = read_stated(path)
    name = stated.get("model_type", str, "")
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(f"model type {name!r} is not supported; supported: {supported()}")
    classes = stated.get("architectures", list, [])
    if classes and classes != [family.class_name]:
        raise UnsupportedModel(
            f"architecture {classes} of model type {name!r} is not supported; "
            f"supported: {supported()}"
        )
    obeyed = {
        key: value
        for key, value in stated.values.items()
        if (value is not None or key in NULL_MEANS_NONE)
        and (key not in OPTIONAL or key in family.assumed)
    }
    return name, family, ModelConfig({**ASSUMED, **family.assumed, **obeyed, **family.fixed})

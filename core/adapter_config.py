"""Parses adapter_config.json of a LoRA adapter's folder, as PEFT saves it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from baton.core.errors import AdapterMissing, InvalidAdapter, InvalidConfig
from baton.core.model_store import read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256

Number = TypeVar("Number", int, float)

_REFUSED = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Keys that need more than products of two matrices, which is not supported."""

_INITIALIZED = (True, False, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base model unchanged."""

_TYPES: dict[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    "use_rslora": (bool,),
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
    "target_modules": (list, str),
    "exclude_modules": (list, str),
    "layers_to_transform": (list, int),
}


@dataclass(frozen=True)
class AdapterScales:
    """Ranks and scales of the product of A and B. Patterns are regular expressions for the end of a
    module's name."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def rank(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        rank, alpha = self.rank(module), _of_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class AdapterConfig:
    scales: AdapterScales
    target_modules: list[str] | str
    exclude_modules: list[str] | str = ""
    layers_to_transform: list[int] | int | None = None

    def targets(self, module: str, layer: int) -> bool:
        """True if the adapter has weights for a linear layer, such as
        "model.layers.0.self_attn.q_proj"."""
        if _names(self.exclude_modules, module):
            return False
        layers = self.layers_to_transform
        chosen = layers in (None, []) or layer in ([layers] if isinstance(layers, int) else layers)
        return self.target_modules == "all-linear" or (
            _names(self.target_modules, module) and (chosen or isinstance(self.target_modules, str))
        )


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises InvalidAdapter, with the key's name, for a key that cannot be served."""
    if not (folder / CONFIG_FILE).is_file():
        raise AdapterMissing(f"{folder} holds no adapter: it has no {CONFIG_FILE}")
    try:
        stated = read_json(folder / CONFIG_FILE)
    except InvalidConfig as error:
        raise InvalidAdapter(error.message) from error
    _check(stated)
    known = {name: stated[name] for name in _TYPES if stated.get(name) is not None}
    for name, value in known.items():
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool) != (bool in _TYPES[name]):
            raise InvalidAdapter(f"{CONFIG_FILE}: {name!r} must not be {value!r}")
    if not known.get("target_modules"):
        raise InvalidAdapter(f"{CONFIG_FILE} lacks 'target_modules'")
    parts = {name: known.pop(name) for name in AdapterScales.__dataclass_fields__ if name in known}
    scales = AdapterScales(**parts)  # type: ignore[arg-type]
    _check_scales(scales)
    return AdapterConfig(scales, **known)  # type: ignore[arg-type]


def _check(stated: dict[str, object]) -> None:
    if stated.get("peft_type") != "LORA":
        raise InvalidAdapter(f"{CONFIG_FILE}: peft_type is {stated.get('peft_type')!r}, not 'LORA'")
    if stated.get("bias") not in (None, "none"):
        raise InvalidAdapter(
            f"{CONFIG_FILE}: bias {stated['bias']!r} is not supported, only 'none'"
        )
    if refused := next((name for name in _REFUSED if stated.get(name)), None):
        raise InvalidAdapter(f"{CONFIG_FILE}: {refused} is not supported")
    if (begun := stated.get("init_lora_weights", True)) not in _INITIALIZED:
        raise InvalidAdapter(
            f"{CONFIG_FILE}: init_lora_weights {begun!r} is not supported: it changes the base"
        )


def _check_scales(scales: AdapterScales) -> None:
    ranks, alphas = scales.rank_pattern, scales.alpha_pattern
    for rank in (scales.r, *ranks.values()):
        if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise InvalidAdapter(f"{CONFIG_FILE}: a rank must be 1 to {MAX_RANK}, not {rank!r}")
    for alpha in (scales.lora_alpha, *alphas.values()):
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise InvalidAdapter(f"{CONFIG_FILE}: an alpha must be a number, not {alpha!r}")


def _of_pattern(patterns: dict[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that matches the end of the name, as in PEFT."""
    found = (value for key, value in patterns.items() if _matches(rf"(.*\.)?({key})", module))
    return next(found, default)


def _names(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and _matches(names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise InvalidAdapter(f"{CONFIG_FILE}: {pattern!r} is not a pattern: {error}") from None

"""Parses how positions rotate queries and keys, from config.json.

What transformers chooses by the length of a call (LongRoPE's factors, dynamic NTK's base) is
chosen once, by the served context: a token's keys must not depend on what follows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.engine.families import Family
from baton.engine.model_config import ModelConfig

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions rotate queries and keys. Fields that a kind does not use are neutral."""

    kind: RopeKind
    theta: float
    dim: int  # number of rotated dimensions: the first of a head, the last of a latent
    factor: float = 1.0
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    stretches: tuple[float, ...] = ()  # factors of each pair's wavelength, for longrope


def read_rope(
    config: ModelConfig, scaling: ModelConfig, family: Family, head_dim: int, max_context: int
) -> Rope:
    """The rope that `scaling`, a part of `config`, asks for in contexts of up to `max_context`."""
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise UnsupportedModel("RoPE parameters that differ between layers are not supported")
    kind = _kind(scaling, family)
    theta = scaling.get("rope_theta", float, config.get("rope_theta", float))
    if theta <= 0.0:
        raise InvalidConfig(f"rope_theta must be above 0, not {theta:g}", field="rope_theta")
    plain = Rope(kind, theta, _rotated(config, scaling, family, head_dim))
    stated = config.get("max_position_embeddings", int)
    original = scaling.get("original_max_position_embeddings", int, stated)
    original = config.get("original_max_position_embeddings", int, original)
    if kind == "linear":
        return replace(plain, factor=scaling.get("factor", float))
    if kind == "dynamic":
        return _dynamic(plain, scaling.get("factor", float), stated, max_context)
    if kind == "longrope":
        return _longrope(plain, scaling, original, stated, max_context)
    if kind == "llama3":
        return _llama3(plain, scaling, original)
    return _yarn(plain, scaling, original, stated) if kind == "yarn" else plain


def _kind(scaling: ModelConfig, family: Family) -> RopeKind:
    name = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    name = family.rope_names.get(name, name)
    kind = next((kind for kind in ROPE_KINDS if kind == name), None)
    if kind is None:
        raise UnsupportedModel(
            f"RoPE scaling {name!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    return kind


def _rotated(config: ModelConfig, scaling: ModelConfig, family: Family, head_dim: int) -> int:
    """The number of a head's dimensions that are rotated."""
    share = config.get("partial_rotary_factor", float, 1.0)
    share = scaling.get("partial_rotary_factor", float, share)
    if share != 1.0 and not family.partial_rotary:
        raise UnsupportedModel("partial rotary embeddings are not supported in this type of model")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise InvalidConfig(f"{dim} dimensions of a head of {head_dim} cannot be rotated in pairs")
    return dim


def _dynamic(plain: Rope, factor: float, stated: int, max_context: int) -> Rope:
    """The base of transformers' rotation in a call of `max_context` tokens."""
    growth = factor * max(max_context / stated, 1.0) - (factor - 1.0)
    theta = plain.theta * growth ** (plain.dim / (plain.dim - 2)) if plain.dim > 2 else plain.theta
    return replace(plain, theta=theta, factor=factor, original_context=stated)


def _llama3(plain: Rope, scaling: ModelConfig, original: int) -> Rope:
    return replace(
        plain,
        factor=scaling.get("factor", float),
        original_context=original,
        low_frequency_factor=scaling.get("low_freq_factor", float),
        high_frequency_factor=scaling.get("high_freq_factor", float),
    )


def _longrope(
    plain: Rope, scaling: ModelConfig, original: int, stated: int, max_context: int
) -> Rope:
    factor = scaling.get("factor", float, stated / original)
    default = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    name = "long_factor" if min(max_context, stated) > original else "short_factor"
    stretches = scaling.get(name, list)
    if len(stretches) != plain.dim // 2 or not all(
        isinstance(each, (int, float)) and each > 0 for each in stretches
    ):
        raise InvalidConfig(f"{name} must have {plain.dim // 2} numbers above 0", field=name)
    return replace(
        plain,
        factor=factor,
        original_context=original,
        attention_factor=scaling.get("attention_factor", float, default),
        stretches=tuple(map(float, stretches)),
    )


def _yarn(plain: Rope, scaling: ModelConfig, original: int, stated: int) -> Rope:
    factor = scaling.get("factor", float, stated / original)
    fast = scaling.get("beta_fast", float, 32.0) or 32.0
    slow = scaling.get("beta_slow", float, 1.0) or 1.0
    if min(fast, slow) <= 0.0 or plain.theta <= 1.0:
        raise InvalidConfig("YaRN needs beta_fast and beta_slow above 0 and rope_theta above 1")
    return replace(
        plain,
        factor=factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=scaling.get("truncate", bool, True),
        attention_factor=scaling.get("attention_factor", float, _yarn_attention(scaling, factor)),
    )


def _yarn_attention(scaling: ModelConfig, factor: float) -> float:
    """YaRN's default correction of the attention temperature."""

    numerator = scaling.get("mscale", float, 0.0)
    denominator = scaling.get("mscale_all_dim", float, 0.0)
    if numerator and denominator:
        return yarn_correction(factor, numerator) / yarn_correction(factor, denominator)
    return yarn_correction(factor, 1.0)


def yarn_correction(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def extended_context(rope: Rope, stated: int, max_context: int) -> int:
    """The context of a model whose config states one. YaRN configs often state the context before
    scaling; dynamic NTK extends it up to `max_context`."""
    if rope.kind == "yarn":
        return max(stated, int(rope.original_context * rope.factor))
    if rope.kind == "dynamic":
        return max(stated, min(max_context, int(stated * rope.factor)))
    return stated

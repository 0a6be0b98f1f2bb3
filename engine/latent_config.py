"""Latent attention, parsed from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.engine.families import Family
from baton.engine.model_config import ModelConfig
from baton.engine.rope import Rope, yarn_correction

NORM_EPSILON = 1e-6
"""The epsilon of latents' norms, independent of config.json."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention; see kernels/latent.py."""

    rank: int  # of a latent, without its rotated part
    rotated: int  # the rotated part of a latent and of a head's query
    plain: int  # the other part of a head's query
    value: int  # of a head
    query_rank: int | None  # of compressed queries; None: queries are not compressed


def parse_latent(config: ModelConfig, family: Family) -> LatentShape | None:
    """Returns None for a model without latent attention."""
    if not family.latent:
        return None
    if config.get("attention_bias", bool):
        raise UnsupportedModel("attention_bias is not supported in models of this type")
    query_rank = config.get("q_lora_rank", int) if "q_lora_rank" in config else None
    shape = LatentShape(
        rank=config.get("kv_lora_rank", int),
        rotated=config.get("qk_rope_head_dim", int),
        plain=config.get("qk_nope_head_dim", int),
        value=config.get("v_head_dim", int),
        query_rank=query_rank,
    )
    if not (shape.rank and shape.rotated and shape.plain and shape.value and query_rank != 0):
        raise InvalidConfig("latent attention needs ranks and sizes of queries and values above 0")
    return shape


def latent_score_scale(config: ModelConfig, shape: LatentShape, rope: Rope) -> float:
    """The scale of a query's product with a key; a stretched rope may raise it."""
    scale = 1.0 / math.sqrt(shape.plain + shape.rotated)
    stated = config.nested("rope_scaling")
    stated = stated if stated.values else config.nested("rope_parameters")
    correction = stated.get("mscale_all_dim", float, 0.0)
    if rope.kind == "default" or not correction:
        return scale
    factor = yarn_correction(stated.get("factor", float), correction)
    return scale * factor * factor

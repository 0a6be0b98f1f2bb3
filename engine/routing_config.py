"""Mixtures of experts, parsed from config.json.

Families have different names for the same settings. A family's row in FAMILIES fixes the keys
that the family does not know.
"""

from __future__ import annotations

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.engine.families import Family
from baton.engine.model_config import ModelConfig
from baton.kernels.routing import Routing

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


def parse_routing(config: ModelConfig, family: Family) -> Routing | None:
    """Returns None for a model without experts."""
    if family.router is None:
        return None
    names = family.expert_counts
    named = next((name for name in names if name in config), names[0])
    experts = config.get(named, int)
    if not experts:
        return None
    columns = config.get("moe_intermediate_size", int, config.get("intermediate_size", int))
    shared = config.get("n_shared_experts", int, 0) * columns
    shared = config.get("shared_expert_intermediate_size", int, shared)
    groups, top_groups = _groups(config)
    routing = Routing(
        experts=experts,
        top_k=config.get("num_experts_per_tok", int),
        columns=columns,
        shared=-(-shared // max(columns, 1)),
        shared_gate=family.shared_gate,
        biased=family.expert_biases,
        scores=family.router,
        corrected=family.router == "sigmoid",
        normalized=config.get("norm_topk_prob", bool, False),
        scale=config.get("routed_scaling_factor", float, 1.0),
        groups=groups,
        top_groups=top_groups,
        group_best=2 if family.router == "sigmoid" else 1,
    )
    _check(routing, shared)
    return routing


def sparse_layers(config: ModelConfig, routing: Routing | None, layers: int) -> tuple[bool, ...]:
    """Which layers have experts; the others have an MLP."""
    if routing is None:
        return (False,) * layers
    dense = config.get("mlp_only_layers", list, [])
    step = config.get("decoder_sparse_step", int, 1)
    first = config.get("first_k_dense_replace", int, 0)
    if not step:
        raise InvalidConfig("decoder_sparse_step must not be 0", field="decoder_sparse_step")
    return tuple(
        layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)
    )


def _groups(config: ModelConfig) -> tuple[int, int]:
    """The number of groups, and how many of them experts are chosen from."""
    method = config.get("topk_method", str, "group_limited_greedy")
    if method not in TOPK_METHODS:
        raise UnsupportedModel(f"topk_method {method!r} is not supported")
    groups = config.get("n_group", int, 1)
    return (1, 1) if method == "greedy" else (groups, config.get("topk_group", int, groups))


def _check(routing: Routing, shared_columns: int) -> None:
    if not (routing.top_k and routing.columns and routing.groups):
        raise InvalidConfig("a mixture needs experts per token, their size, and a group")
    if shared_columns % routing.columns:
        raise UnsupportedModel(
            f"a shared expert of {shared_columns} columns is not supported beside experts of"
            f" {routing.columns}: it must be a multiple"
        )
    if routing.experts % routing.groups:
        raise InvalidConfig(
            f"{routing.experts} experts cannot form {routing.groups} groups evenly", field="n_group"
        )
    if not 0 < routing.top_groups <= routing.groups:
        raise InvalidConfig(
            f"{routing.top_groups} of {routing.groups} groups cannot be chosen", field="topk_group"
        )
    each = routing.experts // routing.groups
    if routing.groups > 1 and each < routing.group_best:
        raise InvalidConfig(f"a group needs {routing.group_best} experts", field="n_group")
    if routing.top_k > each * routing.top_groups:
        raise InvalidConfig(
            f"{routing.top_k} experts per token cannot be chosen from {each * routing.top_groups}",
            field="num_experts_per_tok",
        )

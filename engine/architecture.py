"""A model's architecture, parsed from its config.json.

A config with unsupported features is refused, never approximated. Code that ships with a model is
never run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.core.page_reach import LayerSlices, cut_layers
from baton.engine.families import Family, LayerNorms, QueryKeyNorm
from baton.engine.latent_config import LatentShape, latent_score_scale, parse_latent
from baton.engine.model_config import ModelConfig, read_config
from baton.engine.quantization_config import Quantization, parse_quantization
from baton.engine.rope import Rope, extended_context, read_rope
from baton.engine.routing_config import parse_routing, sparse_layers
from baton.kernels.routing import Routing

if TYPE_CHECKING:
    from baton.kernels.linear import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "clamped_swiglu": "clamped_swiglu",
}
"""Activations by transformers' names; the last has none there."""

HARMLESS: dict[str, tuple[object, ...]] = {
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "attention_chunk_size": (None,),
    "num_kv_shared_layers": (0, None),
    "per_layer_config": ({}, None),
    "transformers_weights": (None,),
}
"""Keys that transformers obeys in any family, with the values that change nothing. Other keys that
a family does not know have no effect there either."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a model. `windows`, `rope_of_layer` and `sparse` have one entry per layer."""

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
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int | None, ...]  # index in `ropes`; None: nothing is rotated
    windows: tuple[int | None, ...]  # a token sees itself and window - 1 tokens before it
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: QueryKeyNorm
    norms: LayerNorms
    norm_offset: float
    activation: Activation
    sinks: bool  # of attention
    fused: bool  # the checkpoint keeps qkv_proj and gate_up_proj
    interleaved: bool  # the checkpoint keeps experts as [inputs, outputs], gate and up in turn
    embedding_scale: float
    embedding_root: bool  # the scale is rounded to the model's dtype
    score_scale: float
    score_cap: float | None
    logit_divisor: float
    logit_cap: float | None
    sparse: tuple[bool, ...]  # experts instead of an MLP
    routing: Routing | None  # of sparse layers
    latent: LatentShape | None  # pages hold one key head of `head_dim` for a token, and no values
    neighbours: bool  # the checkpoint keeps the two numbers of a rotated pair side by side
    extra_layers: int  # further layers that the checkpoint may have, and that are not run
    quantization: Quantization | None  # of the checkpoint

    @property
    def value_dim(self) -> int:
        """The size of a head's values."""
        return self.latent.rank if self.latent else self.head_dim

    def pages_shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        """[page, layer of a slice, k/v, token, kv_head, dim]; see kernels/cache.py."""
        parts = 1 if self.latent else 2
        return (pages, self.slices.layers, parts, page_size, self.kv_heads, self.head_dim)

    @property
    def prefixes_not_run(self) -> tuple[str, ...]:
        """Prefixes of the tensors of layers that predict further tokens, which are not run."""
        return tuple(f"model.layers.{self.layers + index}." for index in range(self.extra_layers))

    @property
    def slices(self) -> LayerSlices:
        return cut_layers(self.windows)


def read_architecture(folder: Path, max_context: int | None = None) -> Architecture:
    """Parses the architecture of the model in `folder`, for contexts of up to `max_context`.
    Raises UnsupportedModel."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(f"{folder} holds an adapter, which is not supported; merge it first")
    return parse_architecture(folder / "config.json", max_context)


def parse_architecture(path: Path, max_context: int | None = None) -> Architecture:
    """Parses a Hugging Face config file. Raises UnsupportedModel."""
    try:
        return _parse(path, max_context)
    except (ArithmeticError, ValueError) as error:
        raise InvalidConfig(f"{path} has numbers that no model can have: {error}") from error


def _parse(path: Path, max_context: int | None) -> Architecture:
    name, family, config = read_config(path)
    _refuse_unsupported(config, family)
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    latent = parse_latent(config, family)
    head_dim = config.get("head_dim", int, hidden // max(heads, 1))
    head_dim = latent.rank + latent.rotated if latent else head_dim
    stated = config.get("max_position_embeddings", int)
    served = max_context or stated
    ropes = _ropes(config, family, latent.rotated if latent else head_dim, served)
    context = extended_context(ropes[0], stated, served)
    rotates = _rotates(config, family)
    windows = _windows(config, family, rotates)
    attention_bias = config.get("attention_bias", bool)
    # The residual stream is kept divided by its multiplier, which saves a product per addition.
    # Norms give the same result if their epsilon is divided by the multiplier's square.
    residual = _positive(config, "residual_multiplier", 1.0)
    embedding = hidden**0.5 if family.embedding_root else 1.0
    routing = parse_routing(config, family)
    architecture = Architecture(
        family=name,
        layers=len(windows),
        hidden=hidden,
        intermediate=config.get("intermediate_size", int),
        heads=heads,
        kv_heads=1 if latent else config.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        vocabulary_size=config.get("vocab_size", int),
        context_length=context,
        norm_epsilon=config.get("rms_norm_eps", float) / residual**2,
        ropes=ropes,
        rope_of_layer=tuple(
            int(family.local_rope and window is not None) if rotated else None
            for rotated, window in zip(rotates, windows, strict=True)
        ),
        windows=tuple(
            None if window is None or window >= context else window for window in windows
        ),
        tied_embeddings=config.get("tie_word_embeddings", bool),
        qkv_bias=_qkv_bias(config, family) or attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", bool),
        query_key_norm=family.query_key_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=_activation(config, family),
        sinks=family.sinks,
        fused=family.fused,
        interleaved=family.interleaved,
        embedding_scale=config.get("embedding_multiplier", float, embedding) / residual,
        embedding_root=family.embedding_root,
        score_scale=latent_score_scale(config, latent, ropes[0])
        if latent
        else _score_scale(config, head_dim),
        score_cap=_cap(config, "attn_logit_softcapping"),
        logit_divisor=_positive(config, "logits_scaling", 1.0),
        logit_cap=_cap(config, "final_logit_softcapping"),
        sparse=sparse_layers(config, routing, len(rotates)),
        routing=routing,
        latent=latent,
        neighbours=config.get("rope_interleave", bool, False),
        extra_layers=config.get("num_nextn_predict_layers", int, 0),
        quantization=parse_quantization(config, interleaved=family.interleaved),
    )
    _check_shape(architecture)
    return architecture


def _positive(config: ModelConfig, key: str, default: float) -> float:
    value = config.get(key, float, default)
    if value <= 0.0:
        raise InvalidConfig(f"{key} must be above 0, not {value:g}", field=key)
    return value


def _cap(config: ModelConfig, key: str) -> float | None:
    return _positive(config, key, 1.0) if key in config else None


def _activation(config: ModelConfig, family: Family) -> Activation:
    name = config.get(family.activation, str)
    if name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"activation {name!r} is not supported; supported: {supported}")
    return ACTIVATIONS[name]


def _score_scale(config: ModelConfig, head_dim: int) -> float:
    scalar = _positive(config, "query_pre_attn_scalar", float(max(head_dim, 1)))
    return config.get("attention_multiplier", float, 1.0 / math.sqrt(scalar))


def _refuse_unsupported(config: ModelConfig, family: Family) -> None:
    for key, harmless in (HARMLESS | family.harmless).items():
        value = config.values.get(key)
        if value not in harmless:
            raise UnsupportedModel(f"config.json: {key} {json.dumps(value)} is not supported")


def _qkv_bias(config: ModelConfig, family: Family) -> bool:
    return config.get("qkv_bias", bool) if family.qkv_bias is None else family.qkv_bias


def _ropes(
    config: ModelConfig, family: Family, head_dim: int, max_context: int
) -> tuple[Rope, ...]:
    """The rope of all layers; or that of layers without a window, then that of layers with one."""
    parameters = config.nested("rope_parameters")
    if not family.local_rope:
        scaling = config.nested("rope_scaling")
        scaling = scaling if scaling.values else parameters
        return (read_rope(config, scaling, family, head_dim, max_context),)
    everywhere = parameters.nested("full_attention").values | config.nested("rope_scaling").values
    local = parameters.nested("sliding_attention").values
    local = {"rope_theta": config.get("rope_local_base_freq", float)} | local
    return tuple(
        read_rope(config, ModelConfig(values), family, head_dim, max_context)
        for values in (everywhere, local)
    )


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
        raise UnsupportedModel("layer_types are not supported in models of this type")
    in_use = config.get("use_sliding_window", bool) or (typed and family.windows == "unrotated")
    window = config.get("sliding_window", int) if in_use and "sliding_window" in config else None
    if window == 0:
        raise InvalidConfig("a sliding window of 0 sees nothing", field="sliding_window")
    if typed:
        return _windows_by_type(config.get("layer_types", list), window, len(rotates))
    return tuple(window if windowed else None for windowed in _by_place(config, family, rotates))


def _by_place(config: ModelConfig, family: Family, rotates: tuple[bool, ...]) -> list[bool]:
    """Which layers have a window, in a config without layer_types."""
    layers = range(len(rotates))
    if family.windows == "unrotated":
        return [not rotated for rotated in rotates]
    if family.windows == "pattern":
        every = max(config.get("sliding_window_pattern", int), 1)
        return [(layer + 1) % every != 0 for layer in layers]
    if family.windows == "alternate":
        end = config.get("max_window_layers", int)
        return [layer % 2 == 0 and layer < end for layer in layers]
    first = config.get("max_window_layers", int) if family.windows == "late" else 0
    return [layer >= first for layer in layers]


def _no_windows(config: ModelConfig, layers: int) -> tuple[None, ...]:
    """Refuses windows. In such a family transformers does not mask by the window, but its cache
    drops what is outside of it: prompts and answers would see different contexts."""
    context = config.get("max_position_embeddings", int)
    if config.get("sliding_window", int, context) < context:
        raise UnsupportedModel("a sliding_window is not supported in models of this type")
    if set(map(str, config.get("layer_types", list, []))) - {"full_attention"}:
        raise UnsupportedModel("layer_types are not supported in models of this type")
    return (None,) * layers


def _windows_by_type(
    types: list[object], window: int | None, layers: int
) -> tuple[int | None, ...]:
    unknown = set(map(str, types)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"layer types {sorted(unknown)} are not supported")
    if len(types) != layers:
        raise InvalidConfig(f"layer_types names {len(types)} of {layers} layers")
    if window is None and "sliding_attention" in types:
        raise InvalidConfig("layer_types has sliding layers, but no sliding window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_shape(architecture: Architecture) -> None:
    heads, kv_heads = architecture.heads, architecture.kv_heads
    if not (heads and kv_heads and architecture.layers and architecture.head_dim):
        raise InvalidConfig("a model needs layers, heads, key heads and a head size")
    if not architecture.context_length:
        raise InvalidConfig("a model needs a context", field="max_position_embeddings")
    if heads % kv_heads:
        raise InvalidConfig(f"{heads} heads cannot share {kv_heads} key heads evenly")
    if architecture.ropes[0].dim % 2 or architecture.head_dim % 2:
        raise InvalidConfig(f"a head size of {architecture.head_dim} cannot be rotated in pairs")


@dataclass(frozen=True, slots=True)
class Split:
    """The share of process `rank` of `size` that run one model.

    cut by outputs   query, key, value, gate, up: a rank computes its own heads and columns
    cut by inputs    output, down: the ranks' products are summed (engine/tensor_parallel.py)
    whole            embeddings, norms and routers, on each rank; the head, on rank 0, which samples

    Every rank has its columns of every expert, as of an MLP. Of norms over all heads, each rank has
    the weights of its heads, and the ranks' squares are summed.

    A rank's pages hold the keys and values of its own heads, under the same page ids on all
    ranks, so rank 0's pool manages the pages of all. Latents have no heads: every rank has whole
    latents and the projections that make them.
    """

    rank: int = 0
    size: int = 1

    def of(self, whole: Architecture) -> Architecture:
        """The architecture of one rank. Raises InvalidConfig if the model cannot be split
        evenly."""
        check_split(whole, self.size)
        routing = whole.routing
        if routing:
            routing = dataclasses.replace(routing, columns=routing.columns // self.size)
        return dataclasses.replace(
            whole,
            routing=routing,
            heads=whole.heads // self.size,
            kv_heads=whole.kv_heads if whole.latent else whole.kv_heads // self.size,
            intermediate=whole.intermediate // self.size,
        )


def check_split(whole: Architecture, size: int) -> None:
    """Raises InvalidConfig if `size` ranks cannot share a model evenly.

    Key heads are not repeated, so there are never more ranks than key heads.
    """
    counts = {
        "key heads": 0 if whole.latent else whole.kv_heads,
        "heads": whole.heads,
        "columns of an MLP": 0 if all(whole.sparse) else whole.intermediate,
        "columns of an expert": whole.routing.columns if whole.routing else 0,
    }
    for what, count in counts.items():
        if count % size:
            raise InvalidConfig(
                f"{size} ranks cannot share the model's {count} {what} evenly",
                field="tensor_parallel",
            )

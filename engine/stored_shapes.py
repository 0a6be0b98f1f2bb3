"""Compares config.json with the headers of safetensors files, before anything is allocated or
started. Imports no torch.

The loader (engine/weights.py) compares every tensor; these few have all sizes that a config names.
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from baton.core.errors import InvalidCheckpoint
from baton.core.model_store import check_pulled, weight_files
from baton.engine.architecture import Architecture

EMBEDDING = "model.embed_tokens.weight"
FIRST = "model.layers.0."
ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.gate")
FIRST_EXPERTS = ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2")
SHARED = ("shared_expert", "shared_experts")
"""Tensors of experts, by families' names."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Shapes = dict[str, list[int]]


def check_stored(folder: Path, architecture: Architecture) -> None:
    """Raises InvalidCheckpoint if the safetensors files of `folder` hold another model than its
    config.json describes. Missing files, and those of other formats, are left to the loader."""
    files = [folder / name for name in weight_files(folder)]
    if not all(file.is_file() for file in files):
        return
    shapes: Shapes = {}
    for file in files:
        shapes |= read_shapes(file)
    _check_layers(shapes, architecture.layers)
    for name, expected in _expected(architecture).items():
        stored = shapes.get(name, expected)
        if stored != expected:
            raise InvalidCheckpoint(
                f"tensor {name} has shape {stored}, config.json asks for {expected}"
            )


def read_shapes(file: Path) -> Shapes:
    """The shape of each tensor. Raises InvalidCheckpoint."""
    check_pulled(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            names: list[str] = opened.keys()
            return {name: list(opened.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise InvalidCheckpoint(f"{file} is not a safetensors file: {error}") from error


def _check_layers(shapes: Shapes, layers: int) -> None:
    found = {int(match[1]) for name in shapes if (match := _LAYER.match(name))}
    if found and layers > max(found) + 1:
        raise InvalidCheckpoint(
            f"config.json asks for {layers} layers, the checkpoint has {max(found) + 1}"
        )


def _expected(architecture: Architecture) -> Shapes:
    """Shapes of tensors that the checkpoint may have. Those of quantized layers differ."""
    hidden = architecture.hidden
    expected = {EMBEDDING: [architecture.vocabulary_size, hidden], "model.norm.weight": [hidden]}
    if architecture.quantization:
        return expected
    expected["lm_head.weight"] = expected[EMBEDDING]
    values = architecture.latent.value if architecture.latent else architecture.head_dim
    expected[f"{FIRST}self_attn.o_proj.weight"] = [hidden, architecture.heads * values]
    expected[f"{FIRST}self_attn.k_proj.weight"] = [
        architecture.kv_heads * architecture.head_dim,
        hidden,
    ]
    if False in architecture.sparse:
        layer = f"model.layers.{architecture.sparse.index(False)}."
        expected[f"{layer}mlp.down_proj.weight"] = [hidden, architecture.intermediate]
    return expected | _latent(architecture) | _experts(architecture)


def _latent(architecture: Architecture) -> Shapes:
    latent, heads = architecture.latent, architecture.heads
    if latent is None:
        return {}
    prefix, query = f"{FIRST}self_attn.", heads * (latent.plain + latent.rotated)
    return {
        f"{prefix}kv_a_proj_with_mqa.weight": [latent.rank + latent.rotated, architecture.hidden],
        f"{prefix}kv_b_proj.weight": [heads * (latent.plain + latent.value), latent.rank],
        f"{prefix}q_proj.weight": [query, architecture.hidden],
        f"{prefix}q_b_proj.weight": [query, latent.query_rank or 0],
    }


def _experts(architecture: Architecture) -> Shapes:
    """Of the first layer that has experts."""
    routing, hidden = architecture.routing, architecture.hidden
    if routing is None or True not in architecture.sparse:
        return {}
    layer = f"model.layers.{architecture.sparse.index(True)}."
    router, down = [routing.experts, hidden], [hidden, routing.columns]
    shared = [hidden, routing.shared * routing.columns]
    return {
        **{f"{layer}{name}.weight": router for name in ROUTERS},
        **{f"{layer}{name}.weight": down for name in FIRST_EXPERTS},
        **{f"{layer}mlp.{name}.down_proj.weight": shared for name in SHARED},
    }

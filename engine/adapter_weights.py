"""Loads a LoRA adapter's weights for the layers of a loaded model.

For each module that it adds to, an adapter has A [rank, inputs] and B [outputs, rank]. If the model
keeps several modules as one layer (qkv, gate and up), their As are stacked, and each B gets its own
rows and columns of one matrix. Rows are arranged and split as those of the model's weights. B
includes the scale.

An adapter of a multimodal model names the layers of its text model differently, and may have
tensors for other towers. Text does not pass through those, so their tensors are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.core.adapter_config import WEIGHTS_FILE, AdapterConfig, read_adapter_config
from baton.core.adapter_store import digest_of, locate_files, weights_of
from baton.core.errors import AdapterMissing, InvalidAdapter
from baton.core.types import Adapter
from baton.engine.architecture import Architecture, Split
from baton.engine.checkpoint import FLOATS
from baton.engine.model import Layer, Model
from baton.engine.rotations import interleave_pairs
from baton.kernels.experts import MLP
from baton.kernels.linear import AnyLinear
from baton.kernels.low_rank import AdapterProducts, LatentLowRank, LowRank

_TEXT_MODEL = r"((model|language_model|text_model)\.)*"
_TENSOR = re.compile(
    rf"(base_model\.model\.)?(?P<module>{_TEXT_MODEL}layers\.(?P<layer>\d+)\.(?P<name>.+))"
    r"\.lora_(?P<side>[AB])(\.default)?\.weight"
)
_OTHER_TOWER = re.compile(
    rf"(?!(base_model\.model\.)?{_TEXT_MODEL}(layers|embed_tokens|lm_head)\.).+\.lora_.+"
)


class StoredPair(NamedTuple):
    """A module's name in the model that the adapter was made for, and its tensors' names."""

    module: str  # such as "model.language_model.layers.0.self_attn.q_proj"
    a: str
    b: str


class ModulePlace(NamedTuple):
    """Where a module is in the layers of this rank's model."""

    module: str  # such as "model.layers.0.self_attn.q_proj"
    number: int  # the model's layer
    layer: AnyLinear
    start: int  # its first output in `layer`
    parts: tuple[int, ...]  # its outputs, in parts that all ranks share evenly
    arrange: Callable[[Tensor], Tensor] | None = None  # reorders and scales the outputs
    summed: bool = False  # split by inputs: the ranks' outputs are summed
    whole: bool = False  # not split
    plain: int = 0  # outputs of each head for its key, if `layer` expands a latent

    @property
    def outputs(self) -> int:
        return sum(self.parts)


class LowRankPair(NamedTuple):
    """A [rank, inputs] and B [outputs, rank] of one place."""

    place: ModulePlace
    a: Tensor
    b: Tensor


def load_adapter(
    adapter: Adapter, model: Model, split: Split, dtype: torch.dtype
) -> AdapterProducts:
    """Returns what the adapter adds to the layers of this rank's `model`. Raises like
    `read_pairs`."""
    pairs: dict[AnyLinear, list[LowRankPair]] = {}
    with torch.inference_mode():
        for pair in read_pairs(adapter, model, split):
            pairs.setdefault(pair.place.layer, []).append(pair)
        heads = model.architecture.heads
        return {layer: _joined(layer, each, heads, dtype) for layer, each in pairs.items()}


def read_pairs(adapter: Adapter, model: Model, split: Split) -> Iterator[LowRankPair]:
    """Yields this rank's parts of an adapter's weights.

    Raises InvalidAdapter if the adapter does not fit the model; at the end, AdapterMissing if its
    files have changed.
    """
    folder = locate_files(adapter)
    yield from _read(folder, read_adapter_config(folder), model, split)
    # Checked after reading, since files may be written meanwhile.
    if digest_of(folder) != adapter.digest:
        raise AdapterMissing(
            f"{adapter.folder} has changed since the adapter was added; add it again"
        )


def _read(folder: Path, config: AdapterConfig, model: Model, split: Split) -> Iterator[LowRankPair]:
    places = {(place.number, _short(place.module)): place for place in places_of(model)}
    try:
        with safe_open(weights_of(folder), framework="pt") as file:
            stored = _stored_pairs(list(file.keys()))
            _check_complete(config, places, stored)
            for key, (module, a, b) in stored.items():
                tensors = file.get_tensor(a), file.get_tensor(b)
                yield _pair(places[key], module, config, split, *tensors)
    except FileNotFoundError as error:
        raise AdapterMissing(f"{folder} holds no adapter: it has no {WEIGHTS_FILE}") from error
    except (OSError, SafetensorError) as error:
        raise InvalidAdapter(f"cannot read {folder / WEIGHTS_FILE}: {error}") from error


def _stored_pairs(tensors: list[str]) -> dict[tuple[int, str], StoredPair]:
    """Returns the tensors of the text model for each layer and module."""
    found: dict[tuple[int, str], dict[str, re.Match[str]]] = {}
    for match in filter(None, map(_of_text_model, tensors)):
        sides = found.setdefault((int(match["layer"]), match["name"]), {})
        other = sides.setdefault(match["side"], match)
        if other is not match:
            raise InvalidAdapter(f"tensors {other.string} and {match.string} are for one module")
    for sides in found.values():
        if len(sides) == 1:
            (only,) = sides.values()
            raise InvalidAdapter(f"tensor {only.string} lacks its counterpart")
    if tensors and not found:
        raise InvalidAdapter(f"the adapter has no tensors of the text model, only {tensors[0]}, …")
    return {
        key: StoredPair(sides["A"]["module"], sides["A"].string, sides["B"].string)
        for key, sides in found.items()
    }


def _of_text_model(tensor: str) -> re.Match[str] | None:
    """None for a tensor of another tower."""
    match = _TENSOR.fullmatch(tensor)
    if match is None and not _OTHER_TOWER.fullmatch(tensor):
        raise InvalidAdapter(
            f"tensor {tensor} is not supported: adapters add to linear layers of the decoder"
        )
    return match


def _check_complete(
    config: AdapterConfig,
    places: dict[tuple[int, str], ModulePlace],
    stored: dict[tuple[int, str], StoredPair],
) -> None:
    if not stored:
        raise InvalidAdapter("the adapter has no tensors")
    for key, pair in stored.items():
        if key not in places:
            known = ", ".join(sorted({name for _, name in places}))
            raise InvalidAdapter(f"the model has no place for tensor {pair.a}; it has {known}")
    text_model, *_ = next(iter(stored.values())).module.partition("layers.")
    for key, place in places.items():
        module = text_model + place.module.removeprefix("model.")
        if config.targets(module, place.number) and key not in stored:
            raise InvalidAdapter(f"the adapter lacks the tensors of {module}")


def _pair(
    place: ModulePlace, module: str, config: AdapterConfig, split: Split, a: Tensor, b: Tensor
) -> LowRankPair:
    """Checks A and B and returns this rank's part of them."""
    rank, inputs = config.scales.rank(module), place.layer.weight.shape[1]
    split = Split() if place.whole else split
    over = (1, split.size) if place.summed else (split.size, 1)
    wanted = {"A": (a, (rank, inputs * over[1])), "B": (b, (place.outputs * over[0], rank))}
    for side, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise InvalidAdapter(
                f"{side} of {module} has shape {list(tensor.shape)}, not {list(shape)}"
            )
        if tensor.dtype not in FLOATS:
            raise InvalidAdapter(f"{side} of {module} is {tensor.dtype}, not a float")
        if not tensor.float().isfinite().all():
            raise InvalidAdapter(f"{side} of {module} has values that are not finite")
    if place.summed:
        a = a.narrow(1, split.rank * inputs, inputs)
    else:
        whole = torch.split(b, [size * split.size for size in place.parts])
        b = torch.cat([part.chunk(split.size)[split.rank] for part in whole])
    b = b.float() * config.scales.scale(module)
    return LowRankPair(place, a, place.arrange(b) if place.arrange else b)


def _joined(
    layer: AnyLinear, pairs: list[LowRankPair], heads: int, dtype: torch.dtype
) -> LowRank | LatentLowRank:
    place, a, b = pairs[0]
    if place.plain:
        return LatentLowRank(a.to(dtype), b.to(dtype).view(heads, -1, len(a)), place.plain)
    a = torch.cat([pair.a.to(dtype) for pair in pairs])
    b = torch.zeros(layer.weight.shape[0], len(a), dtype=dtype)
    column = 0
    for pair in pairs:
        row, rank = pair.place.start, len(pair.a)
        b[row : row + pair.place.outputs, column : column + rank] = pair.b
        column += rank
    return LowRank(a, b)


def places_of(model: Model) -> Iterator[ModulePlace]:
    """Yields the modules that adapters may add to, those of one layer in order of its outputs."""
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        attention = _latent if layer.latent else _attention
        yield from attention(model.architecture, layer, prefix + "self_attn.", number)
        if isinstance(layer.mlp, MLP):
            yield from _mlp(model.architecture, layer.mlp, prefix + "mlp.", number)


def _attention(
    shape: Architecture, layer: Layer, prefix: str, number: int
) -> Iterator[ModulePlace]:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    turned = shape.head_dim if layer.rope is None else shape.ropes[layer.rope].dim

    def arrange(b: Tensor, start: int = 0) -> Tensor:
        """Interleaves the rotated pairs of queries, keys or both."""
        b = interleave_pairs(b, head_dim=shape.head_dim, dim=turned)
        if layer.balance is None:
            return b
        return b * layer.balance[start : start + len(b)].unsqueeze(1).to(b)

    yield ModulePlace(prefix + "o_proj", number, layer.output, 0, (shape.hidden,), summed=True)
    if shape.fused:

        def turn(b: Tensor) -> Tensor:
            return torch.cat((arrange(b[: query + key]), b[query + key :]))

        yield ModulePlace(prefix + "qkv_proj", number, layer.qkv, 0, (query, key, key), turn)
        return
    yield ModulePlace(prefix + "q_proj", number, layer.qkv, 0, (query,), arrange)
    arrange_keys = partial(arrange, start=query)
    yield ModulePlace(prefix + "k_proj", number, layer.qkv, query, (key,), arrange_keys)
    yield ModulePlace(prefix + "v_proj", number, layer.qkv, query + key, (key,))


def _latent(shape: Architecture, layer: Layer, prefix: str, number: int) -> Iterator[ModulePlace]:
    products, sizes = layer.latent, shape.latent
    assert products is not None
    assert sizes is not None
    head, latent = sizes.plain + sizes.rotated, sizes.rank + sizes.rotated
    queries = shape.heads * head

    def arrange(b: Tensor, size: int = head) -> Tensor:
        """Interleaves the rotated pairs, which are at the end of each head or latent."""
        if shape.neighbours:
            return b
        parts = b.view(-1, size, b.shape[1])
        turned = parts[:, -sizes.rotated :]
        joined = interleave_pairs(turned.flatten(0, 1), sizes.rotated, sizes.rotated)
        return torch.cat((parts[:, : -sizes.rotated], joined.view_as(turned)), 1).flatten(0, 1)

    size = sizes.query_rank or queries
    if products.query:
        yield ModulePlace(prefix + "q_a_proj", number, layer.qkv, 0, (size,), whole=True)
        yield ModulePlace(prefix + "q_b_proj", number, products.query, 0, (queries,), arrange)
    else:
        yield ModulePlace(prefix + "q_proj", number, layer.qkv, 0, (queries,), arrange)
    arrange_latent = partial(arrange, size=latent)
    module = prefix + "kv_a_proj_with_mqa"
    yield ModulePlace(module, number, layer.qkv, size, (latent,), arrange_latent, whole=True)
    both = (len(products.both.weight),)
    yield ModulePlace(prefix + "kv_b_proj", number, products.both, 0, both, plain=sizes.plain)
    yield ModulePlace(prefix + "o_proj", number, layer.output, 0, (shape.hidden,), summed=True)


def _mlp(shape: Architecture, mlp: MLP, prefix: str, number: int) -> Iterator[ModulePlace]:
    size = shape.intermediate
    yield ModulePlace(prefix + "down_proj", number, mlp.down, 0, (shape.hidden,), summed=True)
    if shape.fused:
        yield ModulePlace(prefix + "gate_up_proj", number, mlp.gate_up, 0, (size, size))
        return
    yield ModulePlace(prefix + "gate_proj", number, mlp.gate_up, 0, (size,))
    yield ModulePlace(prefix + "up_proj", number, mlp.gate_up, size, (size,))


def _short(module: str) -> str:
    return module.split(".", 3)[3]

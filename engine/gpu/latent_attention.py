"""Attention over pages of latents on a GPU, for any mix of rows of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.engine.gpu.batch import Ints, StepArrays
from baton.engine.gpu.forward import Attend
from baton.engine.gpu.paged_attention import cos_sin
from baton.engine.gpu.prompt_attention import LongChunk
from baton.engine.latent_config import NORM_EPSILON
from baton.engine.model import Layer, Model
from baton.kernels.gpu.expanded_attention import expanded_attention
from baton.kernels.gpu.head_products import head_products
from baton.kernels.gpu.latent_attention import (
    MOST_BYTES,
    chunk_latents,
    decode_latents,
    filling_heads,
)
from baton.kernels.gpu.latent_low_rank import LatentAdapters
from baton.kernels.gpu.latent_projection import (
    LatentSizes,
    Stores,
    absorb_and_store,
    rotate_and_store_latents,
)
from baton.kernels.gpu.pages import gather_tokens
from baton.kernels.gpu.rotary import Projected
from baton.kernels.gpu.splits import SplitWorkspace
from baton.kernels.latent import LatentHeads


class LatentAttention:
    """PagedAttention for models with latent attention."""

    def __init__(
        self, model: Model, kv: Tensor, table: Tensor, context: int, max_batch: int
    ) -> None:
        """kv [page, layer, 1, token, 1, rank + rotated]; table [sequences, pages]."""
        shape, latent = model.architecture, model.architecture.latent
        assert latent is not None
        if shape.head_dim * kv.element_size() > MOST_BYTES and kv.device.type == "cuda":
            raise InvalidConfig(
                f"latents of {shape.head_dim} numbers are served on a GPU in bfloat16 or float16",
                field="dtype",
            )
        self._weights = model.layers
        self._table = table
        self._max_batch = max_batch
        self._layers = [kv[:, index] for index in range(shape.layers)]
        self._sizes = LatentSizes(
            shape.heads,
            latent.rank,
            latent.rotated,
            latent.plain,
            latent.value,
            shape.score_scale,
            NORM_EPSILON,
        )
        self._cos_sin = cos_sin(shape.ropes[0], latent.rotated, context).to(kv.device)
        self._workspace = SplitWorkspace.make(
            max_batch, context, shape.heads, filling_heads(shape.heads), latent.rank, kv.device
        )

    def of_decoding(self, slots: Tensor, positions: Tensor) -> Attend:
        """For rows that are their sequence's one new token: slots and positions [T]."""

        def attend(layer: int, projected: Projected) -> Tensor:
            query = self._queries(layer, projected, positions, (slots, self._table))
            out = self._new_output(query)
            self._decode(layer, query, slots, positions, out)
            return self._values(layer, out, projected.adapters)

        return attend

    def of_guesses(
        self, slots: Tensor, positions: Tensor, stores: Tensor, blocks: Tensor
    ) -> Attend:
        """Like of_decoding, since latents of all rows are stored before the first is attended."""
        return self.of_decoding(slots, positions)

    def of_blocks(self, positions: Tensor, stores: Tensor, blocks: Tensor) -> Attend:
        """For steps of chunks only: positions and stores [T], blocks [n, 4]."""

        def attend(layer: int, projected: Projected) -> Tensor:
            query = self._queries(layer, projected, positions, stores)
            out = self._new_output(query)
            chunk_latents(query, blocks, self._table, self._layers[layer], self._sizes, out)
            return self._values(layer, out, projected.adapters)

        return attend

    def of_any(
        self,
        arrays: StepArrays,
        slots: Tensor,
        positions: Tensor,
        stores: Tensor,
        blocks: Tensor,
        samples: Tensor,
    ) -> Attend:
        """For any step; the tensors are those of `arrays` on the device.

        In the last layer only the rows `samples` are attended.
        """
        decoding = slice(0, arrays.decoding)

        def attend(layer: int, projected: Projected) -> Tensor:
            adapters = projected.adapters
            plain, query = self._begin(layer, projected, positions, stores)
            if layer == len(self._layers) - 1:
                adapters = adapters and adapters.of_samples()
                plain, query = plain[samples], query[samples]
                self._absorb(layer, plain, query, adapters)
                out = self._sampled(layer, query, slots[samples], positions[samples])
                return self._values(layer, out, adapters)
            if arrays.long and arrays.long[0].count == arrays.count:
                slot = _adapter_slot(arrays.long[0], arrays.adapters)
                return self._expanded(layer, arrays.long[0], plain, query, adapters, slot)
            self._absorb(layer, plain, query, adapters)
            out = self._new_output(query)
            self._decode(layer, query[decoding], slots[decoding], positions[decoding], out)
            if len(blocks):
                chunk_latents(query, blocks, self._table, self._layers[layer], self._sizes, out)
            values = self._values(layer, out, adapters)
            for chunk in arrays.long:
                rows = slice(chunk.first, chunk.first + chunk.count)
                slot = _adapter_slot(chunk, arrays.adapters)
                values[rows] = self._expanded(
                    layer, chunk, plain[rows], query[rows], adapters, slot
                )
            return values

        return attend

    def _expanded(
        self,
        layer: int,
        chunk: LongChunk,
        plain: Tensor,
        query: Tensor,
        adapters: LatentAdapters | None,
        slot: int,
    ) -> Tensor:
        """A chunk's plain queries [count, heads, plain], and its rotated ones in `query`
        -> [count, heads * value]. `slot` is that of its adapter, or -1."""
        sizes, latent = self._sizes, _latent(self._weights[layer])
        tokens = chunk.start + chunk.count
        latents = query.new_empty(tokens, 1, sizes.latent)
        gather_tokens(self._layers[layer], self._table[chunk.slot], tokens, latents)
        latents = latents.squeeze(1)
        shared = latents[:, : sizes.rank].expand(sizes.heads, -1, -1)
        keys = torch.bmm(shared, latent.absorb.weight)
        values = torch.bmm(shared, latent.expand.weight.transpose(1, 2))
        if adapters and slot >= 0:
            adapters.expand_chunk(slot, shared[0], keys, values)
        out = query.new_empty(chunk.count, sizes.heads, sizes.value)
        turned, turned_keys = query[..., sizes.rank :], latents[:, sizes.rank :]
        expanded_attention(plain, turned, keys, turned_keys, values, chunk.start, sizes, out)
        return out.flatten(1)

    def _sampled(self, layer: int, query: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows that each end their sequence, attended as if they decoded: [n, heads, rank]."""
        out = self._new_output(query)
        for start in range(0, len(out), self._max_batch):
            rows = slice(start, start + self._max_batch)
            self._decode(layer, query[rows], slots[rows], positions[rows], out[rows])
        return out

    def _queries(
        self, layer: int, projected: Projected, positions: Tensor, stores: Stores
    ) -> Tensor:
        """[T, heads, rank + rotated]; the tokens' latents are stored."""
        weights, kv_layer = self._weights[layer], self._layers[layer]
        plain, query = absorb_and_store(
            projected,
            self._cos_sin,
            positions,
            stores,
            kv_layer,
            self._sizes,
            _key_norm(weights),
            _latent(weights).absorb.weight,
        )
        if projected.adapters:
            projected.adapters.absorb(plain, query)
        return query

    def _begin(
        self, layer: int, projected: Projected, positions: Tensor, stores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, plain], and [T, heads, rank + rotated], of which only the rotated part
        is filled; the tokens' latents are stored."""
        sizes, kv_layer = self._sizes, self._layers[layer]
        query = projected.qkv.new_empty(len(projected.qkv), sizes.heads, sizes.latent)
        norm = _key_norm(self._weights[layer])
        plain = rotate_and_store_latents(
            projected, self._cos_sin, positions, stores, kv_layer, sizes, norm, query
        )
        return plain, query

    def _absorb(
        self, layer: int, plain: Tensor, query: Tensor, adapters: LatentAdapters | None
    ) -> None:
        head_products(plain, _latent(self._weights[layer]).absorb.weight, query)
        if adapters:
            adapters.absorb(plain, query)

    def _decode(
        self, layer: int, query: Tensor, slots: Tensor, positions: Tensor, out: Tensor
    ) -> None:
        if len(query):
            kv_layer, sizes = self._layers[layer], self._sizes
            decode_latents(
                query, slots, positions, self._table, kv_layer, sizes, self._workspace, out
            )

    def _values(self, layer: int, attended: Tensor, adapters: LatentAdapters | None) -> Tensor:
        """attended [T, heads, rank] -> [T, heads * value]."""
        out = attended.new_empty(len(attended), self._sizes.heads, self._sizes.value)
        head_products(attended, _latent(self._weights[layer]).expand.weight, out)
        if adapters:
            adapters.expand(attended, out)
        return out.flatten(1)

    def _new_output(self, query: Tensor) -> Tensor:
        return query.new_empty(len(query), self._sizes.heads, self._sizes.rank)


def _adapter_slot(chunk: LongChunk, slots: Ints | None) -> int:
    """The slot of the chunk's adapter; -1 without one."""
    return -1 if slots is None else int(slots[chunk.first])


def _key_norm(layer: Layer) -> Tensor:
    assert layer.key_norm is not None
    return layer.key_norm.weight


def _latent(layer: Layer) -> LatentHeads:
    assert layer.latent is not None
    return layer.latent

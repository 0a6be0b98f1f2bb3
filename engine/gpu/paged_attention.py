"""Attention over the paged memory on a GPU, for any mix of rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.gpu.batch import StepArrays
from baton.engine.gpu.forward import Attend
from baton.engine.gpu.numerics import Numerics
from baton.engine.gpu.prompt_attention import library_attention, own_attention
from baton.engine.model import Model
from baton.engine.rope import Rope
from baton.engine.rotations import Rotation
from baton.kernels.gpu.chunk_attention import chunk_attention
from baton.kernels.gpu.decode_attention import decode_attention
from baton.kernels.gpu.guess_attention import guess_attention
from baton.kernels.gpu.rotary import LOG2_E, HeadShape, Projected, rotate_and_store
from baton.kernels.gpu.splits import SplitWorkspace


class PagedAttention:
    def __init__(
        self,
        model: Model,
        kv: Tensor,
        tables: Sequence[Tensor],
        context: int,
        max_batch: int,
        numerics: Numerics,
    ) -> None:
        """kv [page, layer, 2, token, kv_head, dim]; tables, one per slice, [sequences, pages]."""
        shape, device = model.architecture, kv.device
        self._weights = model.layers
        self._by_head = shape.query_key_norm == "head"
        self._max_batch = max_batch
        places = shape.slices.places
        self._slices = [number for number, _ in places]
        self._tables = [tables[number] for number in self._slices]
        self._layers = [kv[:, place] for _, place in places]
        self._shapes = _head_shapes(model)
        tables = [cos_sin(rope, shape.head_dim, context).to(device) for rope in shape.ropes]
        self._cos_sin = [tables[layer.rope or 0] for layer in model.layers]
        self._workspace = SplitWorkspace.make(
            max_batch, context, shape.heads, shape.kv_heads, shape.head_dim, device
        )
        self._attend_long = own_attention if numerics is Numerics.INVARIANT else library_attention

    def of_decoding(self, slots: Tensor, positions: Tensor) -> Attend:
        """For rows that are their sequence's one new token: slots and positions [T]."""

        def attend(layer: int, projected: Projected) -> Tensor:
            return self._decode(layer, projected, slots, positions)

        return attend

    def of_guesses(
        self, slots: Tensor, positions: Tensor, stores: Tensor, blocks: Tensor
    ) -> Attend:
        """For decoding sequences with guesses, whose rows see each other: stores [slices, T],
        blocks [n, 4]."""

        def attend(layer: int, projected: Projected) -> Tensor:
            self._store(layer, projected, positions, stores)
            return guess_attention(
                projected.qkv,
                blocks,
                self._tables[layer],
                self._layers[layer],
                self._shapes[layer],
                self._workspace,
                self._new_output(projected.qkv),
            )

        return attend

    def of_blocks(self, positions: Tensor, stores: Tensor, blocks: Tensor) -> Attend:
        """For steps of chunks only: positions [T], stores [slices, T], blocks [n, 4]."""

        def attend(layer: int, projected: Projected) -> Tensor:
            self._store(layer, projected, positions, stores)
            return self._blocks(layer, projected.qkv, blocks, self._new_output(projected.qkv))

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
        decoding = arrays.decoding
        rest = slice(decoding, arrays.count)

        def attend(layer: int, projected: Projected) -> Tensor:
            if layer == len(self._layers) - 1:
                sampled = projected.rows(samples)
                self._store(layer, projected, positions, stores)
                return self._sampled(layer, sampled, slots[samples], positions[samples])
            qkv = projected.qkv
            out = self._new_output(qkv)
            if decoding:
                here = slice(0, decoding)
                self._decode(layer, projected.rows(here), slots[here], positions[here], out[here])
            self._store(layer, projected.rows(rest), positions[rest], stores[:, rest])
            if len(blocks):
                self._blocks(layer, qkv, blocks, out)
            for chunk in arrays.long:
                found = self._attend_long(
                    qkv, chunk, self._tables[layer], self._layers[layer], self._shapes[layer]
                )
                if chunk.count == arrays.count:
                    return found
                out[chunk.first : chunk.first + chunk.count] = found
            return out

        return attend

    def _sampled(
        self, layer: int, projected: Projected, slots: Tensor, positions: Tensor
    ) -> Tensor:
        """Rows that each end their sequence, attended as if they decoded."""
        out = self._new_output(projected.qkv)
        for start in range(0, len(out), self._max_batch):
            rows = slice(start, start + self._max_batch)
            self._decode(layer, projected.rows(rows), slots[rows], positions[rows], out[rows])
        return out

    def _new_output(self, qkv: Tensor) -> Tensor:
        return qkv.new_empty(len(qkv), self._shapes[0].heads * self._shapes[0].head_dim)

    def _decode(
        self,
        layer: int,
        projected: Projected,
        slots: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        return decode_attention(
            projected,
            self._cos_sin[layer],
            slots,
            positions,
            self._tables[layer],
            self._layers[layer],
            self._shapes[layer],
            self._workspace,
            self._new_output(projected.qkv) if out is None else out,
            *self._norms(layer),
        )

    def _blocks(self, layer: int, qkv: Tensor, blocks: Tensor, out: Tensor) -> Tensor:
        return chunk_attention(
            qkv, blocks, self._tables[layer], self._layers[layer], self._shapes[layer], out
        )

    def _store(self, layer: int, projected: Projected, positions: Tensor, stores: Tensor) -> None:
        layer_kv, shape = self._layers[layer], self._shapes[layer]
        rotate_and_store(
            projected,
            self._cos_sin[layer],
            positions,
            stores[self._slices[layer]],
            layer_kv,
            shape,
            *self._norms(layer),
        )

    def _norms(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The norms of heads; those of whole projections are applied earlier."""
        query, key = self._weights[layer].query_norm, self._weights[layer].key_norm
        return (query.weight, key.weight) if self._by_head and query and key else (None, None)


def _head_shapes(model: Model) -> list[HeadShape]:
    shape = model.architecture
    return [
        HeadShape(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            layer.window,
            layer.rope is not None,
            shape.norm_epsilon,
            layer.scoring,
            None if layer.sinks is None else layer.sinks * LOG2_E,
        )
        for layer in model.layers
    ]


def cos_sin(rope: Rope, head_dim: int, context: int) -> Tensor:
    """[context, head_dim]: each position's cosines, one per pair, then its sines."""
    turns = Rotation(rope, head_dim)(torch.arange(context))[:, 0]
    return torch.cat((turns.real, turns.imag), dim=1).contiguous()

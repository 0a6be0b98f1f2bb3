"""Latent attention (MLA): the keys and values of all heads are products of a token's latent.

A latent has `rank` numbers, which are normed, and `rotated` numbers; pages hold nothing else. A
head's key is a product of the normed numbers, followed by the rotated numbers; its value is another
product of the normed numbers. Neither is computed. Instead the key's product is applied to the
query (absorb), so that latents serve as keys of all heads and their first `rank` numbers as values;
the value's product is applied to the weighted sum (expand). Prompts and answers are computed alike,
in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from baton.kernels.linear import HeadLinear, Linear, RMSNorm

if TYPE_CHECKING:
    from baton.kernels.low_rank import AdaptedRows


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """A layer's products between the residual's projection and attention, and after attention."""

    query: Linear | None  # applied to the projection; None if that already holds the queries
    query_norm: RMSNorm | None
    absorb: HeadLinear  # [heads, rank, plain]
    expand: HeadLinear  # [heads, value, rank]
    both: Linear  # [heads * (plain + value), rank]: absorb and expand in one; only its shape counts
    rotated: int

    def pack(self) -> None:
        """As Linear.pack."""
        for part in (self.query, self.absorb, self.expand):
            if part:
                part.pack()

    def queries_and_latent(self, projected: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """projected [T, queries + rank + rotated] -> [T, heads + 1, rank + rotated], not yet
        normed or rotated. Includes what the rows' adapters add to queries."""
        heads, rank, plain = self.absorb.weight.shape
        size = rank + self.rotated
        queries, latents = projected[:, :-size], projected[:, -size:]
        if self.query:
            queries = self.query(queries, self.query_norm, adapted)
        queries = queries.view(len(latents), heads, -1)
        out = latents.new_empty(len(latents), heads + 1, size)
        out[:, :heads, :rank] = self.absorb(queries[..., :plain])
        if adapted:
            adapted.absorb(self.both, queries[..., :plain], out[:, :heads, :rank])
        out[:, :heads, rank:] = queries[..., plain:]
        out[:, heads] = latents
        return out

    def values(self, attended: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """attended [T, heads * rank] -> [T, heads * value], with what the rows' adapters add."""
        attended = attended.view(len(attended), *self.expand.weight.shape[::2])
        values = self.expand(attended)
        if adapted:
            adapted.expand(self.both, attended, values)
        return values.flatten(1)

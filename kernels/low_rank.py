"""LoRA adapters of linear layers, in a batch whose rows may have different adapters.

An adapter's product is shrink, then expand: two linear layers, so that on a CPU with compiled
products a row's sums run in one order, whatever the other rows are. The result is added to the
layer's own product. Rows without an adapter add zeros, as they do in a batch without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear import AnyLinear, HeadLinear, Linear, RMSNorm

RANKS = 4
"""Ranks are padded to a multiple of this, which compiled products need."""


class LowRank:
    """x @ a.T @ b.T"""

    __slots__ = ("_expand", "_shrink")

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """a [rank, in]; b [out, rank], which includes the adapter's scale."""
        a, b = _padded(a, b)
        self._shrink, self._expand = Linear(a), Linear(b)
        self._shrink.pack()
        self._expand.pack()

    def __call__(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [rows, in], normalized if a norm is given -> [rows, out]."""
        return self._expand(self._shrink(x, norm))


class LatentLowRank:
    """The same for the products between latents and heads (kernels/latent.py), per head:
    x @ b.T @ a for queries and x @ a.T @ b.T for values."""

    __slots__ = ("_a", "_keys", "_transposed", "_values")

    def __init__(self, a: Tensor, b: Tensor, plain: int) -> None:
        """a [rank, latent]; b [heads, plain + value, rank], which includes the adapter's scale."""
        a, b = _padded(a, b)
        self._keys = HeadLinear(b[:, :plain].transpose(1, 2).contiguous())
        self._transposed = Linear(a.t().contiguous())
        self._a = Linear(a)
        self._values = HeadLinear(b[:, plain:].contiguous())
        for part in (self._keys, self._transposed, self._a, self._values):
            part.pack()

    def absorbed(self, queries: Tensor) -> Tensor:
        """queries [rows, heads, plain] -> [rows, heads, latent]."""
        return _apply_to_heads(self._transposed, self._keys(queries))

    def expanded(self, attended: Tensor) -> Tensor:
        """attended [rows, heads, latent] -> [rows, heads, value]."""
        return self._values(_apply_to_heads(self._a, attended))


def _apply_to_heads(linear: Linear, x: Tensor) -> Tensor:
    """One product for all heads: x [rows, heads, in] -> [rows, heads, out]."""
    return linear(x.flatten(0, 1)).view(*x.shape[:2], -1)


def _padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pads the rank of a [rank, in] and b [..., out, rank] with zeros."""
    missing = -len(a) % RANKS
    return functional.pad(a, (0, 0, 0, missing)), functional.pad(b, (0, missing))


AdapterProducts = Mapping[AnyLinear, LowRank | LatentLowRank]
"""One adapter's products, by the layers of the model that they add to."""


Product = TypeVar("Product", LowRank, LatentLowRank)
Rows = Tensor | slice


class _Group(NamedTuple):
    rows: Rows
    products: AdapterProducts


class AdaptedRows:
    """The rows of a batch, grouped by adapter."""

    __slots__ = ("_groups",)

    def __init__(self, adapters: Sequence[AdapterProducts | None]) -> None:
        """`adapters` has each row's adapter, or None."""
        rows: dict[int, list[int]] = {}
        for row, products in enumerate(adapters):
            if products is not None:
                rows.setdefault(id(products), []).append(row)
        self._groups = [
            _Group(
                slice(None) if len(each) == len(adapters) else torch.tensor(each),
                adapters[each[0]] or {},
            )
            for each in rows.values()
        ]

    def added(self, layer: AnyLinear, x: Tensor, norm: RMSNorm | None = None) -> Tensor | None:
        """x [rows, in], normalized if a norm is given -> [rows, out]; None if no row's adapter adds
        to this layer."""
        total = None
        for rows, product in self._products(layer, LowRank):
            if total is None:
                total = x.new_zeros(len(x), layer.weight.shape[0])
            total[rows] = product(x[rows], norm)
        return total

    def absorb(self, layer: AnyLinear, queries: Tensor, absorbed: Tensor) -> None:
        """Adds to absorbed [rows, heads, latent] what adapters make of queries
        [rows, heads, plain]."""
        for rows, product in self._products(layer, LatentLowRank):
            absorbed[rows] += product.absorbed(queries[rows])

    def expand(self, layer: AnyLinear, attended: Tensor, values: Tensor) -> None:
        """Adds to values [rows, heads, value] what adapters make of attended
        [rows, heads, latent]."""
        for rows, product in self._products(layer, LatentLowRank):
            values[rows] += product.expanded(attended[rows])

    def _products(self, layer: AnyLinear, kind: type[Product]) -> Iterator[tuple[Rows, Product]]:
        for group in self._groups:
            product = group.products.get(layer)
            if isinstance(product, kind):
                yield group.rows, product

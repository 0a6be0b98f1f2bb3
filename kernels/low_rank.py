"""What LoRA adapters add to linear layers, in a batch whose rows may have different ones.

A layer's product is shrink, then expand: two linear layers, so that on a CPU with compiled products
a row's sums run in one order, whatever the other rows are. The result is the addend of the layer's
own product: rows without an adapter have zeros there, as they have without any adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear import AnyLinear, Linear, RMSNorm

RANKS = 4
"""A rank is filled up to a multiple of it, which compiled products need."""


class LowRank:
    """x @ a.T @ b.T"""

    __slots__ = ("_expand", "_shrink")

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """a [rank, in]; b [out, rank], with the adapter's scale."""
        missing = -len(a) % RANKS
        self._shrink = Linear(functional.pad(a, (0, 0, 0, missing)))
        self._expand = Linear(functional.pad(b, (0, missing)))
        self._shrink.pack()
        self._expand.pack()

    def __call__(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [rows, in], normalized if a norm is given -> [rows, out]."""
        return self._expand(self._shrink(x, norm))


AdapterProducts = Mapping[AnyLinear, LowRank]
"""What one adapter adds, by the layers of the model that it adds to."""


class _Group(NamedTuple):
    rows: Tensor | slice
    products: AdapterProducts


class AdaptedRows:
    """The rows of a batch by their adapters."""

    __slots__ = ("_groups",)

    def __init__(self, adapters: Sequence[AdapterProducts | None]) -> None:
        """Of each row."""
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
        """x [rows, in], normalized if a norm is given -> [rows, out]; None where no row's adapter
        adds to this layer."""
        groups = [group for group in self._groups if layer in group.products]
        if not groups:
            return None
        total = x.new_zeros(len(x), layer.weight.shape[0])
        for group in groups:
            total[group.rows] = group.products[layer](x[group.rows], norm)
        return total

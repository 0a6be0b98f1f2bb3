"""A prompt's embedding, collected over its steps: the mean of its hidden states, or the last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from baton.engine.sequence import Sequence  # imports this module


class PooledRows:
    """The sum of one prompt's rows so far."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None  # [hidden], float64, on the host
        self.count = 0

    def add(self, total: Tensor, count: int) -> None:
        """total [hidden]: the sum of `count` rows, after the model's last norm."""
        self._sum = total if self._sum is None else self._sum + total
        self.count += count

    @property
    def embedding(self) -> bytes:
        """float32, little-endian."""
        assert self._sum is not None
        return (self._sum / self.count).numpy().astype("<f4").tobytes()


@dataclass(frozen=True, slots=True)
class PooledStep:
    """A step's rows of embeddings, summed by sequence."""

    counts: dict[Sequence, int]  # rows of each
    totals: Tensor  # [n, hidden], float64, on the device or the host

    def moved(self, move: Callable[[Tensor], Tensor]) -> PooledStep:
        return replace(self, totals=move(self.totals))

    def store(self) -> None:
        """Adds the sums to their sequences. The step must have ended."""
        for (sequence, count), total in zip(self.counts.items(), self.totals.cpu(), strict=True):
            assert sequence.pooled is not None
            sequence.pooled.add(total, count)


def pool_rows(
    sequences: Iterable[Sequence],
    normed: Callable[[], Tensor],
    indices: Callable[[list[int]], Tensor],
) -> PooledStep | None:
    """Sums the rows of embeddings; None if there are none.

    `sequences` has the sequence of each row that the last layer computed. `normed` returns these
    rows [n, hidden], and `indices` makes a tensor of a list on their device.
    """
    places: defaultdict[Sequence, list[int]] = defaultdict(list)
    for place, sequence in enumerate(sequences):
        if sequence.pooled is not None:
            places[sequence].append(place)
    if not places:
        return None
    counts = {sequence: len(held) for sequence, held in places.items()}
    rows = normed()[indices([place for held in places.values() for place in held])]
    # In float64, since a prompt has many rows, and in one order. `unsafe` skips a check that waits.
    totals = torch.segment_reduce(
        rows.double(), "sum", lengths=indices(list(counts.values())), unsafe=True
    )
    return PooledStep(counts, totals)

"""A distribution in four numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Zeros where there are no values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        # The nearest rank: a value that was measured.
        ranks = (max(0, -(-percent * len(ordered) // 100) - 1) for percent in PERCENTILES)
        return cls(sum(ordered) / len(ordered), *(ordered[rank] for rank in ranks))

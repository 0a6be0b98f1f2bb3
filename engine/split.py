"""How a model is divided among processes: each has a share of the heads and of the MLP.

    cut by outputs   query, key, value, gate, up: a rank computes its own heads and columns
    cut by inputs    output, down: each rank's product is a part of the sum (engine/group.py)
    whole            embeddings and norms, on each rank; the head, on rank 0, which samples

A rank's pages hold the keys and values of its own heads. Page ids are the same on all ranks,
so one pool's bookkeeping, rank 0's, is that of all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baton.core.errors import InvalidConfig
from baton.engine.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Split:
    """The share of process number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def of(self, whole: Architecture) -> Architecture:
        """What one rank runs. Raises InvalidConfig where a model cannot be shared evenly."""
        check_split(whole, self.size)
        return dataclasses.replace(
            whole,
            heads=whole.heads // self.size,
            kv_heads=whole.kv_heads // self.size,
            intermediate=whole.intermediate // self.size,
        )


def check_split(whole: Architecture, size: int) -> None:
    """Raises InvalidConfig when `size` ranks cannot share a model evenly.

    Key heads are not repeated: there are never more ranks than key heads.
    """
    counts = {
        "key heads": whole.kv_heads,
        "heads": whole.heads,
        "columns of an MLP": whole.intermediate,
    }
    for what, count in counts.items():
        if count % size:
            raise InvalidConfig(
                f"{size} ranks cannot share the model's {count} {what} evenly",
                field="tensor_parallel",
            )

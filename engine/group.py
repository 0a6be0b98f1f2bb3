"""The processes that run one model together, each with its share of it (engine/split.py).

Rank 0 tells the others each step, and all run it: after attention and after the MLP their
parts are summed up. Rank 0 alone has the head, and samples. All are on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from engine.split import Split

PATIENCE = timedelta(minutes=2)
"""The longest that a rank waits for another within a step; then it ends."""


class Group:
    """One rank's view of the group. On rank 0, `others` lead to the other ranks, in order."""

    def __init__(
        self, split: Split, meeting_point: Path, others: Sequence[Connection] = ()
    ) -> None:
        self.split = split
        self._meeting_point = meeting_point
        self._others = others
        self._backend: ProcessGroupGloo

    def meet(self) -> None:
        """Returns when every rank is connected to every other one; then none needs the file
        `meeting_point` any more."""
        store = FileStore(str(self._meeting_point), self.split.size)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = PATIENCE
        self._backend = ProcessGroupGloo(store, self.split.rank, self.split.size, options)
        self.wait()

    def tell(self, step: bytes) -> None:
        """From rank 0: has all others run a step."""
        for other in self._others:
            other.send_bytes(step)

    def close(self) -> None:
        """From rank 0: there are no more steps."""
        for other in self._others:
            other.close()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on each of them.

        Added up in the order of ranks, so that a row's sum does not depend on its place.
        """
        parts = part.new_empty(self.split.size, *part.shape)
        gather = self._backend._allgather_base  # type: ignore[attr-defined]
        gather(_bytes(parts), _bytes(part.contiguous())).wait()
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    def wait(self) -> None:
        """Returns when all ranks are here."""
        self.sum(torch.zeros(1))


def _bytes(tensor: Tensor) -> Tensor:
    """Nothing is computed on the way, and not every type may travel."""
    return tensor.view(torch.uint8).view(-1)

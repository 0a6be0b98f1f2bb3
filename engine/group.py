"""The processes that run one model together, each with its share of it (engine/split.py).

Rank 0 tells the others each step, over sockets, and all run it: after attention and after the
MLP their parts are summed up (engine/collectives.py). Rank 0 alone has the head, and samples.
All are on one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.collectives import Collectives, connect
from baton.engine.split import Split


class Group:
    """One rank's view of the group. On rank 0, `others` lead to the other ranks, in order."""

    def __init__(
        self,
        split: Split,
        meeting_point: Path,
        others: Sequence[Connection] = (),
        *,
        own_devices: bool = False,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`own_devices` says that each rank has a GPU of its own. `loaded` is called when this
        rank is about to meet the others: it returns when all others have loaded too, or raises
        why one cannot; or tells rank 0 that this one has."""
        self.split = split
        self._meeting_point = meeting_point
        self._others = others
        self._own_devices = own_devices
        self._loaded = loaded
        self._device = torch.device("cpu")
        self._collectives: Collectives

    def meet(self, device: torch.device) -> None:
        """Returns when every rank is connected to every other one. Its sums are on `device`."""
        self._loaded()
        self._device = device
        self._collectives = connect(
            self.split, self._meeting_point, device, own_devices=self._own_devices
        )
        self.wait()

    @property
    def recordable(self) -> bool:
        """Whether a recorded step may have sums in it."""
        return self._collectives.recordable

    def tell(self, step: bytes) -> None:
        """From rank 0: has all others run a step."""
        for other in self._others:
            other.send_bytes(step)

    def close(self) -> None:
        """From rank 0: there are no more steps."""
        for other in self._others:
            other.close()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on each of them. `part` may be overwritten."""
        return self._collectives.sum(part) if part.numel() else part

    def share(self, values: Tensor) -> None:
        """Overwrites the values with those of rank 0."""
        self._collectives.share(values)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return self._collectives.least(number)

    def wait(self) -> None:
        """Returns when all ranks are here; on a GPU of its own, what is launched from now on
        begins when they are."""
        self.sum(torch.zeros(1, device=self._device))

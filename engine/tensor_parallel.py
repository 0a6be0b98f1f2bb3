"""The processes that run one model together, each with its share of it (engine/architecture.py).

Rank 0 tells the others each step, over sockets, and all run it: after attention and after the
MLP their parts are summed up (engine/tensor_parallel.py). Rank 0 alone has the head, and samples.
All are on one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from baton.engine.architecture import Split
from baton.kernels.linear import Linear


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

    def broadcast(self, step: bytes) -> None:
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


PATIENCE = timedelta(minutes=2)
"""The longest that a rank waits for another within a step; then it ends."""


class Collectives(Protocol):
    recordable: bool
    """Whether a recorded step may have them in it."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on each of them. `part` may be overwritten."""

    def share(self, values: Tensor) -> None:
        """Overwrites the values with those of rank 0."""

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""


def connect(
    split: Split, meeting_point: Path, device: torch.device, *, own_devices: bool
) -> Collectives:
    """Returns when every rank is connected to every other one, in a process of its own if
    each has a GPU.

    `meeting_point` is a file that does not exist yet. NCCL looks there now and then for as long
    as it is used, gloo never again.
    """
    store = FileStore(str(meeting_point), split.size)
    if own_devices:
        return NcclCollectives(store, split, device)
    return GlooCollectives(store, split)


class GlooCollectives:
    recordable = False

    def __init__(self, store: FileStore, split: Split) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = PATIENCE
        self._size = split.size
        self._group = ProcessGroupGloo(store, split.rank, split.size, options)

    def sum(self, part: Tensor) -> Tensor:
        """Added up in the order of ranks, so that a row's sum does not depend on its place."""
        parts = self._gather(part)
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total.to(part.device)

    def share(self, values: Tensor) -> None:
        values.copy_(self._gather(values)[0])

    def least(self, number: int) -> int:
        return int(self._gather(torch.tensor([number])).min())

    def _gather(self, part: Tensor) -> Tensor:
        """[size, ...], in host memory."""
        here = part.contiguous().cpu()
        parts = here.new_empty(self._size, *here.shape)
        gather = self._group._allgather_base  # type: ignore[attr-defined]
        gather(_bytes(parts), _bytes(here)).wait()
        return parts


class NcclCollectives:
    """Nothing here waits for the GPU but `least`."""

    recordable = True

    def __init__(self, store: FileStore, split: Split, device: torch.device) -> None:
        distributed.init_process_group(
            "nccl",
            store=store,
            rank=split.rank,
            world_size=split.size,
            timeout=PATIENCE,
            device_id=device,
        )
        self._device = device

    def sum(self, part: Tensor) -> Tensor:
        distributed.all_reduce(part)
        return part

    def share(self, values: Tensor) -> None:
        distributed.broadcast(values, src=0)

    def least(self, number: int) -> int:
        smallest = torch.tensor(number, device=self._device)
        distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
        return int(smallest)


def _bytes(tensor: Tensor) -> Tensor:
    """Nothing is computed on the way, and not every type may travel."""
    return tensor.view(torch.uint8).view(-1)


class SummedLinear(Linear):
    """Cut by inputs: what the ranks make of theirs is summed up. Only rank 0 has the bias."""

    __slots__ = ("group",)

    def __init__(self, weight: Tensor, bias: Tensor | None, group: Group) -> None:
        super().__init__(weight, bias)
        self.group = group

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, out], the same on all ranks, + the sum."""
        part = self(x) if self.group.split.rank else super().add_to(residual, x)
        return self.group.sum(part)

"""What ranks exchange within a step, and with what.

    gloo   ranks on CPUs, or on GPUs that they share: through host memory, and the host waits
    nccl   ranks with a GPU each: in the order of the GPU's stream, also within recorded steps

`connect` alone knows which it is.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from baton.engine.split import Split

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

"""The processes that run one model together, each with its share of it (architecture.Split).

Rank 0 broadcasts each step over sockets, and all ranks run it: after attention and after the MLP
their parts are summed. Only rank 0 has the head, and samples. All ranks are on one host.

    Group      gloo: ranks on CPUs, or on GPUs that they share; the host waits for sums
    NcclGroup  ranks with a GPU each: in the order of the GPU's stream, also in recorded steps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.nn import functional

from baton.engine.architecture import Split
from baton.kernels.experts import Experts
from baton.kernels.linear import Linear, RMSNorm
from baton.kernels.low_rank import AdaptedRows

TIMEOUT = timedelta(minutes=2)
"""A rank that waits longer for another within a step ends."""


class Group:
    """One rank's view of the group. On rank 0, `others` has a connection to each other rank, in
    order."""

    recordable = False
    """Whether a recorded step may contain sums."""

    def __init__(
        self,
        split: Split,
        rendezvous: Path,
        others: Sequence[Connection] = (),
        *,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`rendezvous` is a file that does not exist yet; NCCL uses it throughout. `loaded` is
        called before the ranks connect: on rank 0 it waits until all others have loaded, or
        raises the error of one; on the others it reports to rank 0."""
        self.split = split
        self._rendezvous = rendezvous
        self._others = others
        self._loaded = loaded
        self._device = torch.device("cpu")

    def connect(self, device: torch.device) -> None:
        """Returns when all ranks are connected. Sums are on `device`."""
        self._loaded()
        self._device = device
        self._open(FileStore(str(self._rendezvous), self.split.size))
        self.wait()

    def broadcast(self, step: bytes) -> None:
        """Called on rank 0: sends a step to all other ranks, which run it."""
        for other in self._others:
            other.send_bytes(step)

    def close(self) -> None:
        """Called on rank 0: ends the steps of the other ranks."""
        for other in self._others:
            other.close()

    def wait(self) -> None:
        """A barrier; with NCCL, for what is launched from now on."""
        self.sum(torch.zeros(1, device=self._device))

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on each of them. `part` may be overwritten.

        Added in the order of ranks, so that a row's sum does not depend on its place.
        """
        if not part.numel():
            return part
        parts = self._gather(part)
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total.to(part.device)

    def share(self, values: Tensor) -> None:
        """Overwrites the values with those of rank 0."""
        values.copy_(self._gather(values)[0])

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return int(self._gather(torch.tensor([number])).min())

    def _open(self, store: FileStore) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        self._gloo = ProcessGroupGloo(store, self.split.rank, self.split.size, options)

    def _gather(self, part: Tensor) -> Tensor:
        """[size, ...], in host memory."""
        here = part.contiguous().cpu()
        parts = here.new_empty(self.split.size, *here.shape)
        gather = self._gloo._allgather_base  # type: ignore[attr-defined]
        gather(_bytes(parts), _bytes(here)).wait()
        return parts


class NcclGroup(Group):
    """Only `least` waits for the GPU."""

    recordable = True

    def sum(self, part: Tensor) -> Tensor:
        """NCCL's own sum of more than two parts begins with a rank that depends on the place in
        the tensor. So each rank adds up a share of the numbers, and all gather the shares."""
        if self.split.size <= 2:
            if part.numel():
                distributed.all_reduce(part)
            return part
        size, numbers = self.split.size, part.reshape(-1)
        whole = functional.pad(numbers, (0, -len(numbers) % size))
        parts = torch.empty_like(whole)
        distributed.all_to_all_single(parts, whole)
        first, *others = parts.view(size, -1)
        for other in others:
            first += other
        distributed.all_gather_into_tensor(whole, first)
        return whole[: len(numbers)].view_as(part)

    def share(self, values: Tensor) -> None:
        distributed.broadcast(values, src=0)

    def least(self, number: int) -> int:
        smallest = torch.tensor(number, device=self._device)
        distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
        return int(smallest)

    def _open(self, store: FileStore) -> None:
        distributed.init_process_group(
            "nccl",
            store=store,
            rank=self.split.rank,
            world_size=self.split.size,
            timeout=TIMEOUT,
            device_id=self._device,
        )


def _bytes(tensor: Tensor) -> Tensor:
    """gloo gathers any type as bytes."""
    return tensor.view(torch.uint8).view(-1)


class SummedLinear(Linear):
    """Cut by inputs: the ranks' products are summed. Only rank 0 has the bias."""

    __slots__ = ("group",)

    def __init__(self, weight: Tensor, bias: Tensor | None, group: Group) -> None:
        super().__init__(weight, bias)
        self.group = group

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        after: RMSNorm | None = None,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """residual [rows, out], the same on all ranks, + the sum, normalized if a norm is given."""
        if after:
            return after.add_to(residual, self.group.sum(self(x, None, adapted)))
        if self.group.split.rank:
            return self.group.sum(self(x, None, adapted))
        return self.group.sum(super().add_to(residual, x, None, adapted))


class SummedNorms:
    """Norms of queries and of keys, each over the heads of all ranks: their squares are summed."""

    __slots__ = ("_add_squares", "_sizes", "group", "key", "query")

    def __init__(self, query: RMSNorm, key: RMSNorm, group: Group) -> None:
        """Both have this rank's part of the weight."""
        self.query, self.key, self.group = query, key, group
        self._sizes = torch.tensor([len(norm.wide) for norm in (query, key)])
        # A product adds up a row in an order that does not depend on the other rows.
        self._add_squares = Linear(torch.eye(2).repeat_interleave(self._sizes, dim=1))

    def pack(self) -> None:
        """Like Linear.pack."""
        self._add_squares.pack()

    def normalize_(self, qkv: Tensor) -> None:
        """Normalizes the queries and keys of qkv [T, queries + keys + values]."""
        part = qkv[:, : int(self._sizes.sum())]
        x = part.float()
        squares = self.group.sum(self._add_squares(x * x))  # [T, 2]
        mean = squares / (self._sizes * self.group.split.size)
        inverse = (mean + self.query.epsilon).rsqrt().repeat_interleave(self._sizes, dim=1)
        part.copy_(x * inverse * torch.cat((self.query.wide, self.key.wide)))


class SummedExperts(Experts):
    """Each rank has its columns of every expert, and the ranks' outputs are summed. Only rank 0 has
    the biases of `down`."""

    __slots__ = ("group",)

    def __init__(self, group: Group, *parts: Any) -> None:
        """`parts` are those of Experts."""
        super().__init__(*parts)
        self.group = group

    def add_to(
        self,
        residual: Tensor,
        norm: RMSNorm | None,
        after: RMSNorm | None = None,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """Like SummedLinear.add_to."""
        if after:
            own = self(residual, norm).to(residual.dtype)
            return after.add_to(residual, self.group.sum(own))
        part = self(residual, norm) if self.group.split.rank else super().add_to(residual, norm)
        return self.group.sum(part.to(residual.dtype))

"""A shard of a simulated worker's pool, as its first process drives it."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import WorkerLost
from baton.kv_transfer.pool_layout import HeadRange
from baton.kv_transfer.transport import PagePart, PageWrite, PoolMemory, TransportEvent
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

from .fabric import CELL_BYTES, SimulatedTransport


class RankLost(WorkerLost):
    """A process of the worker has ended."""


class SimulatedShard:
    """In the place of `ShardProxy`."""

    def __init__(self, transport: SimulatedTransport, heads: HeadRange | None) -> None:
        self._transport = transport
        self._heads = heads or HeadRange(0, 0)
        self._digests: list[list[int]] = []  # made and not asked for yet

    def register(self, layout: PoolLayout) -> PoolShard:
        size = CELL_BYTES * len(self._transport.cells)
        memory = PoolMemory(0, size, len(self._transport.memory), "cpu")
        pool = self._transport.register(memory, layout)
        first, count = self._heads
        return PoolShard(first_head=first, heads=count, pool=pool)

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        return self._transport.connect(address, part)

    def disconnect(self, peer: str) -> None:
        self._transport.disconnect(peer)

    def write(self, write: PageWrite) -> int:
        return self._transport.write(write)

    def poll(self) -> list[TransportEvent]:
        if self._transport.dead:
            raise RankLost("a process of this worker is gone")
        return self._transport.poll()

    def close(self) -> None:
        self._transport.close()

    def begin_digests(self, pages: Sequence[int], part: PagePart | None) -> None:
        self._digests.append(self.digest(pages, part))

    def end_digests(self) -> list[int]:
        return self._digests.pop(0)

    def digest(self, ids: Sequence[int], part: PagePart | None = None) -> list[int]:
        cells = self._transport.cells
        if part is not None:
            first, size = part.local_offset // CELL_BYTES, part.row_bytes // CELL_BYTES
            length = len(cells) // part.rows
            cells = [
                cell for place, cell in enumerate(cells) if first <= place % length < first + size
            ]
        pages = [[self._transport.memory[page][cell] for cell in cells] for page in ids]
        return [
            sum(c * (place + 3) for place, c in enumerate(page)) % 4_294_967_291 for page in pages
        ]

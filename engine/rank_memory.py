"""Rows of host memory that all ranks of a worker share: each copies its own part of a page.

    a row   [rank, bytes]: a whole page, as the heads of rank 0, then those of rank 1, …

Rank 0 decides which page goes to which row; the others do the same with their parts, as they
are told over a socket. So whoever reads or writes rows, such as the thread that writes files,
has whole pages before it, and is rank 0's alone.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy
from torch import Tensor

from baton.engine.page_file import PageBytes
from baton.engine.page_memory import Move, PageMemory, page_memory
from baton.engine.split import Split

SAVE, RESTORE = 0, 1
DONE = b"done"


def share_rows(
    kv: Tensor, split: Split, rows: int, file: int, others: Sequence[Connection]
) -> RankMemory:
    """On rank 0: makes the rows, in the empty memory file `file` that all ranks have, and has
    the others use them. `kv` [page, ...] is rank 0's pool."""
    os.ftruncate(file, (rows + 1) * split.size * kv[0].nbytes)
    for other in others:
        other.send_bytes(b"there are rows")
    room = _room(file, kv, split)
    own = page_memory(kv, rows, room[:, split.rank])
    return RankMemory(own, room.reshape(rows + 1, -1), others)


def follow_copies(kv: Tensor, split: Split, file: int, first: Connection) -> None:
    """On another rank: copies as rank 0 says, until `first`, which leads to it, ends."""
    first.recv_bytes()
    room = _room(file, kv, split)
    memory = page_memory(kv, len(room) - 1, room[:, split.rank])
    while True:
        kind, *numbers = numpy.frombuffer(first.recv_bytes(), numpy.int32).tolist()
        moves = list(zip(numbers[::2], numbers[1::2], strict=True))
        if kind == SAVE:
            memory.save(moves)
        for page, row in moves if kind == RESTORE else ():
            memory.restore(row, page)
        first.send_bytes(DONE)


class RankMemory:
    """Rank 0's memory, which has all ranks copy: one order after the other."""

    def __init__(self, own: PageMemory, room: PageBytes, others: Sequence[Connection]) -> None:
        """room [rows + 1, bytes of a whole page]."""
        self._own = own
        self._room = room
        self._others = others
        self._turn = threading.Lock()
        self.staging = own.staging

    def row(self, row: int) -> PageBytes:
        found: PageBytes = self._room[row]
        return found

    def save(self, moves: Sequence[Move]) -> None:
        with self._turn:
            self._tell(SAVE, moves)
            self._own.save(moves)
            self._wait()

    def restore(self, row: int, page: int) -> None:
        with self._turn:
            self._tell(RESTORE, [(page, row)])
            self._own.restore(row, page)
            self._wait()

    def _tell(self, kind: int, moves: Sequence[Move]) -> None:
        numbers = [kind, *(number for move in moves for number in move)]
        message = numpy.array(numbers, numpy.int32).tobytes()
        for other in self._others:
            other.send_bytes(message)

    def _wait(self) -> None:
        for other in self._others:
            other.recv_bytes()


def _room(file: int, kv: Tensor, split: Split) -> PageBytes:
    """[rows + 1, rank, bytes], in the memory that all ranks have."""
    mapped = mmap.mmap(file, 0)
    return numpy.frombuffer(mapped, numpy.uint8).reshape(-1, split.size, kv[0].nbytes)

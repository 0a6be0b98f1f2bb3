"""Measures how fast pages travel between two processes of this host.

A second process serves a pool of its own. Every push moves all pages of the pool, in random order
at both ends, so that no two are moved as one. At the end the bytes are checked.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import torch

from baton.core.errors import BatonError, Internal
from baton.kv_transfer.routed_transport import RouteChoice, RoutedTransport
from baton.kv_transfer.transport import Noted, PageWrite, PoolMemory, WriteDone, WriteFailed
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

WARM_UP_PUSHES = 3
DEADLINE_SECONDS = 120.0
_LAYOUT = PoolLayout(version=1, model="probe")

_Kind = TypeVar("_Kind")
MakeTransport = Callable[[], RoutedTransport]
"""Called in both processes, so it must be picklable: a module's function, or a partial of one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of pushes of `bytes` bytes each."""

    choice: RouteChoice
    bytes: int
    written: list[float]  # seconds until the sender knows that all bytes are in place
    noted: list[float]  # seconds until the receiver gets the note

    @property
    def gigabytes_per_second(self) -> float:
        """The speed of the median push, until the receiver's note."""
        return self.bytes / statistics.median(self.noted) / 1e9


class _Pool:
    """A pool of pages, each filled with one number of 4 bytes."""

    def __init__(self, shape: _Shape) -> None:
        size = (shape.pages, shape.page_bytes // 4)
        self._words = torch.full(size, -1, dtype=torch.int32, device=shape.device)
        self.memory = PoolMemory(
            self._words.data_ptr(), shape.page_bytes, shape.pages, shape.device
        )
        self._synchronize()

    def number_pages(self) -> None:
        """Fills each page with its number."""
        self._words[:] = torch.arange(len(self._words), device=self._words.device)[:, None]
        self._synchronize()

    def page_numbers(self) -> list[tuple[int, int]]:
        """The first and the last word of each page."""
        return [(first, last) for first, last in self._words[:, [0, -1]].tolist()]

    def _synchronize(self) -> None:
        if self._words.is_cuda:
            torch.cuda.synchronize()


class _Shape(NamedTuple):
    device: str
    page_bytes: int
    pages: int


def measure(
    make_transport: MakeTransport, device: str, *, page_bytes: int, pages: int, pushes: int
) -> Measured:
    """Times `pushes` pushes of all pages. Raises BatonError if they fail."""
    shape = _Shape(device, page_bytes, pages)
    pool, transport = _Pool(shape), make_transport()
    pool.number_pages()
    with _other_process(make_transport, shape) as pipe:
        try:
            transport.register(pool.memory, _LAYOUT)
            peer = transport.connect(PoolAddress.FromString(_receive(pipe, bytes)))
            choice = transport.chosen[peer]
            order = list(range(pages))
            local, remote = (random.Random(seed).sample(order, pages) for seed in (1, 2))
            times = [
                _push(transport, peer, local, remote, pipe) for _ in range(WARM_UP_PUSHES + pushes)
            ][WARM_UP_PUSHES:]
            pipe.send(None)
            _check(_receive(pipe, list), local, remote)
        finally:
            transport.close()
    return Measured(choice, page_bytes * pages, [t[0] for t in times], [t[1] for t in times])


def _push(
    transport: RoutedTransport, peer: str, local: list[int], remote: list[int], pipe: Connection
) -> tuple[float, float]:
    """Seconds until it is written, and until the receiver has the note."""
    began = time.monotonic()
    number = transport.write(PageWrite(peer, local, remote, b"pushed"))
    written = 0.0
    while not written:
        for event in transport.poll():
            if isinstance(event, WriteFailed) and event.write == number:
                raise event.error
            if event == WriteDone(number):
                written = time.monotonic() - began
        if time.monotonic() - began > DEADLINE_SECONDS:
            raise Internal("a push never ended")
    # A monotonic clock is the same for all processes of a host.
    return written, _receive(pipe, float) - began


def _check(found: list[tuple[int, int]], local: list[int], remote: list[int]) -> None:
    expected = {target: source for source, target in zip(local, remote, strict=True)}
    wrong = [page for page, ends in enumerate(found) if ends != (expected[page], expected[page])]
    if wrong:
        raise Internal(f"{len(wrong)} of {len(found)} pages did not arrive, first {wrong[0]}")


def _receive(pipe: Connection, kind: type[_Kind]) -> _Kind:
    """The other process's next message; raises its error."""
    if not pipe.poll(DEADLINE_SECONDS):
        raise Internal("the other process does not answer")
    try:
        answer = pipe.recv()
    except EOFError:
        raise Internal("the other process ended") from None
    if isinstance(answer, BatonError):
        raise answer
    assert isinstance(answer, kind)
    return answer


@contextmanager
def _other_process(make_transport: MakeTransport, shape: _Shape) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make_transport, shape), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.join(2.0)
        process.kill()


def _serve(pipe: Connection, make_transport: MakeTransport, shape: _Shape) -> None:
    """The other process: serves a pool, and reports the time of each note."""
    try:
        _serve_pool(pipe, make_transport, shape)
    except Exception as error:  # noqa: BLE001 - the process's edge: the other one must learn of it
        pipe.send(error if isinstance(error, BatonError) else Internal(repr(error)))


def _serve_pool(pipe: Connection, make_transport: MakeTransport, shape: _Shape) -> None:
    pool, transport = _Pool(shape), make_transport()
    address = transport.register(pool.memory, _LAYOUT)
    pipe.send(address.SerializeToString())
    while not pipe.poll():
        for event in transport.poll():
            if isinstance(event, Noted):
                pipe.send(time.monotonic())
    pipe.send(pool.page_numbers())
    transport.close()

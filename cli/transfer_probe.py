"""How fast pages travel between two processes of this host, measured.

The other process is started for it and serves a pool of its own. Every push
moves all pages of the pool, in a random order at both ends, so that no two of
them travel as one piece; at the end the bytes are checked.
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
from typing import Protocol, TypeVar

import numpy

from baton.core.errors import BatonError, Internal
from baton.kv_transfer.routed_transport import RouteChoice, RoutedTransport
from baton.kv_transfer.transport import Noted, PoolMemory, WriteDone, WriteFailed
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

WARM_UP_PUSHES = 3
DEADLINE_SECONDS = 120.0
_LAYOUT = PoolLayout(version=1, model="probe")

_Kind = TypeVar("_Kind")
MakeTransport = Callable[[], RoutedTransport]
"""Called in both processes, so it must be a name of a module, or a partial of one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Pushes of `bytes` bytes each."""

    choice: RouteChoice
    bytes: int
    written: list[float]  # seconds until the sender knows that all bytes are in place
    heard: list[float]  # seconds until the receiver hears the note

    @property
    def gigabytes_per_second(self) -> float:
        """Of the median push, until the receiver hears of it."""
        return self.bytes / statistics.median(self.heard) / 1e9


class _Words(Protocol):
    """A pool's memory as numbers of 4 bytes."""

    base: int

    def number_pages(self) -> None:
        """Writes each page's number into its words."""

    def page_numbers(self) -> list[tuple[int, int]]:
        """The first and the last word of each page."""


class _CpuWords:
    def __init__(self, pages: int, words: int) -> None:
        self._array = numpy.full((pages, words), -1, dtype=numpy.int32)
        self.base = self._array.ctypes.data

    def number_pages(self) -> None:
        self._array[:] = numpy.arange(len(self._array))[:, None]

    def page_numbers(self) -> list[tuple[int, int]]:
        return [(int(page[0]), int(page[-1])) for page in self._array]


class _CudaWords:
    def __init__(self, pages: int, words: int) -> None:
        import torch

        self._torch = torch
        self._tensor = torch.full((pages, words), -1, dtype=torch.int32, device="cuda")
        self.base = self._tensor.data_ptr()
        torch.cuda.synchronize()

    def number_pages(self) -> None:
        pages = len(self._tensor)
        self._tensor[:] = self._torch.arange(pages, device="cuda")[:, None]
        self._torch.cuda.synchronize()

    def page_numbers(self) -> list[tuple[int, int]]:
        ends = self._tensor[:, [0, -1]].cpu().tolist()
        return [(first, last) for first, last in ends]


@dataclass(frozen=True, slots=True)
class _Shape:
    device: str
    page_bytes: int
    pages: int

    def allocate(self) -> _Words:
        kind = _CudaWords if self.device == "cuda" else _CpuWords
        return kind(self.pages, self.page_bytes // 4)

    def memory(self, words: _Words) -> PoolMemory:
        return PoolMemory(words.base, self.page_bytes, self.pages, self.device)


def measure(
    make_transport: MakeTransport, device: str, *, page_bytes: int, pages: int, pushes: int
) -> Measured:
    """Times `pushes` pushes of all pages. Raises BatonError when they cannot be made."""
    shape = _Shape(device, page_bytes, pages)
    words, transport = shape.allocate(), make_transport()
    words.number_pages()
    with _other_process(make_transport, shape) as pipe:
        try:
            transport.register(shape.memory(words), _LAYOUT)
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
    """Seconds until it is written, and until it is heard of."""
    began = time.monotonic()
    number = transport.write(peer, local, remote, b"pushed")
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
    """What the other process sends next; raises what went wrong there."""
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
    """The other process: serves a pool, and says when it has heard each note."""
    try:
        _serve_pool(pipe, make_transport, shape)
    except Exception as error:  # noqa: BLE001 - the process's edge: the other one must hear of it
        pipe.send(error if isinstance(error, BatonError) else Internal(repr(error)))


def _serve_pool(pipe: Connection, make_transport: MakeTransport, shape: _Shape) -> None:
    words, transport = shape.allocate(), make_transport()
    address = transport.register(shape.memory(words), _LAYOUT)
    pipe.send(address.SerializeToString())
    while not pipe.poll():
        for event in transport.poll():
            if isinstance(event, Noted):
                pipe.send(time.monotonic())
    pipe.send(words.page_numbers())
    transport.close()

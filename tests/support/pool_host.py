"""Pools in another process, driven from this one.

One process hosts the pools of all tests of a module, since starting one with a GPU takes seconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from forks import fork
from pools import Pool

from baton.core.errors import BatonError
from baton.kv_transfer.transport import PageWrite, TransportEvent
from baton.v1.transfer_pb2 import PoolAddress

ANSWER_SECONDS = 60.0
STUCK_SECONDS = 30.0


class PoolHost:
    """Another process; `make_pool` makes a pool there."""

    def __init__(self, pipe: Connection, process: BaseProcess) -> None:
        self._pipe = pipe
        self._process = process
        self._made = 0

    def make_pool(self, kind: str, page_bytes: int) -> HostedPool:
        self._made += 1
        return HostedPool(self, self._made, kind, page_bytes)

    def call(self, pool: int, method: str, *arguments: object) -> Any:
        self._pipe.send((pool, method, arguments))
        assert self._pipe.poll(ANSWER_SECONDS), f"no answer to {method}"
        answer = self._pipe.recv()
        if isinstance(answer, BatonError):
            raise answer
        return answer

    def kill(self) -> None:
        """Returns when the process has ended."""
        self._process.kill()
        self._process.join()


class HostedPool:
    """A `Pool` of another process that is also its own transport."""

    def __init__(self, host: PoolHost, number: int, kind: str, page_bytes: int) -> None:
        self._host = host
        self._number = number
        self.page_bytes = page_bytes
        self.events: list[TransportEvent] = []
        address = self._call("make", kind, page_bytes)
        self.address = PoolAddress.FromString(address)
        self.transport = self

    def page(self, index: int) -> bytes:
        return bytes(self._call("page", index))

    def fill(self, index: int, value: int) -> None:
        self._call("fill", index, value)

    def connect(self, address: PoolAddress) -> str:
        return str(self._call("connect", address.SerializeToString()))

    def write(self, write: PageWrite) -> int:
        return int(self._call("write", write))

    def poll(self) -> list[TransportEvent]:
        return list(self._call("poll"))

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: object) -> Any:
        return self._host.call(self._number, method, *arguments)


AnyPool = Pool | HostedPool


def poll_until(condition: Callable[[], object], *pools: AnyPool) -> None:
    """Polls all pools, as their threads would, until the condition holds."""
    deadline = time.monotonic() + STUCK_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the transport is stuck"
        for pool in pools:
            pool.events += pool.transport.poll()
        time.sleep(0.0005)


@contextmanager
def pool_host() -> Iterator[PoolHost]:
    """A process for pools, ended with the block."""
    here, there = multiprocessing.Pipe()
    process = fork(_serve, (there,))
    yield PoolHost(here, process)
    if process.is_alive():
        here.send(None)
        process.join(10)
    process.kill()


def _serve(pipe: Connection) -> None:
    """The other process: executes calls until it is told to stop."""
    pools: dict[int, Pool] = {}
    while (call := pipe.recv()) is not None:
        number, method, arguments = call
        try:
            pipe.send(_perform(pools, number, method, arguments))
        except BatonError as error:
            pipe.send(error)


def _perform(pools: dict[int, Pool], number: int, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "make":
        pools[number] = Pool(*arguments)
        return pools[number].address.SerializeToString()
    pool = pools[number]
    if method == "connect":
        return pool.transport.connect(PoolAddress.FromString(arguments[0]))
    owner = pool if method in ("page", "fill") else pool.transport
    return getattr(owner, method)(*arguments)

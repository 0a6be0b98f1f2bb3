"""A host that belongs to no cluster tries a worker: python stranger.py ADDRESS [AUTHORITY].

Prints, as JSON, what it was given and what it could do: attach to the worker over gRPC, as a router
does, without a certificate; and with the address that this returns, without any ticket, write a
page of the worker's pool and read it back.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import grpc
import numpy

from baton.core.types import PROTOCOL
from baton.kv_transfer.nixl_transport import NixlTransport
from baton.kv_transfer.transport import PageWrite, PoolMemory, WriteDone
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.v1.transfer_pb2 import PoolAddress

SECONDS = 20.0


def attach(address: str, authority: str) -> PoolAddress | str:
    """The worker's pool, or why it is refused."""
    trusted = Path(authority).read_bytes() if authority else None
    credentials = grpc.ssl_channel_credentials(trusted)
    channel = (
        grpc.secure_channel(address, credentials) if authority else grpc.insecure_channel(address)
    )
    hello = worker_pb2.RouterMessage(hello=worker_pb2.Hello(protocol=PROTOCOL))
    try:
        call = worker_pb2_grpc.WorkerStub(channel).Attach(iter([hello]), timeout=SECONDS)
        return next(call).welcome.pool
    except grpc.RpcError as error:
        return str(error.code())


class Intruder:
    """A NIXL agent that uses the pool as if its pages were reserved for it."""

    def __init__(self, pool: PoolAddress) -> None:
        self._size = pool.page_bytes
        self._memory = numpy.zeros(2 * self._size, dtype=numpy.uint8)
        self._transport = NixlTransport()
        base = int(self._memory.ctypes.data)
        self._transport.register(PoolMemory(base, self._size, 2, "cpu"), pool.layout)
        self._peer = self._transport.connect(pool)

    def write(self, value: int) -> bool:
        """Fills the pool's first page."""
        self._memory[: self._size] = value
        number = self._transport.write(PageWrite(self._peer, [0], [0]))
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if WriteDone(number) in self._transport.poll():
                return True
        return False

    def read(self) -> int:
        """The first byte of the pool's first page; -1 if it cannot be read."""
        engine, place = self._transport._engine, numpy.asarray([0], dtype=numpy.int32)
        pages = self._transport._peers[self._peer].pages
        own = numpy.asarray([1], dtype=numpy.int32)
        handle = engine.make_prepped_xfer("READ", self._transport._own_pages, own, pages, place)
        engine.transfer(handle)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if engine.check_xfer_state(handle) == "DONE":
                return int(self._memory[self._size])
        return -1


def main() -> None:
    address, authority = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    given = attach(address, authority)
    if isinstance(given, str):
        print(json.dumps({"refused": given}))
        return
    intruder = Intruder(given)
    wrote = intruder.write(0x5A)
    print(json.dumps({"agent": given.agent, "wrote": wrote, "read": intruder.read()}), flush=True)


if __name__ == "__main__":
    main()

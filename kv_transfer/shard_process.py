"""A shard of a worker's pool in another rank: rank 0's end and the rank's end.

    rank 0                             rank 1, 2, …
    ShardProxy ──commands──▶ serve_shard ──▶ the shard's own transport
               ◀──answers, events───

Both ends are processes of one worker, so commands and events are sent as they are,
pickled, over a socket that the rank has inherited. The rank decides nothing: it
runs rank 0's commands on its transport. When the rank ends, `ShardProxy.poll` raises
and the worker ends too: what the rank had sent may still arrive, so the outcome of
its writes is unknown. When rank 0 ends, `serve_shard` returns.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from baton.core.errors import BatonError, WorkerLost
from baton.kv_transfer.pool_layout import HeadRange, PageDigest, choose_digest
from baton.kv_transfer.transfer_thread import IDLE_PAUSE_SECONDS, polling_pause
from baton.kv_transfer.transport import (
    Noted,
    PagePart,
    PageWrite,
    PoolMemory,
    SlicingTransport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

ANSWER_SECONDS = 60.0
"""How long a rank may take to answer: it may be in a long write."""

REGISTER_SECONDS = 600.0
"""How long a rank may take to register its pool: it may be loading the model."""

CLOSE_SECONDS = 5.0

POLL_SECONDS = 0.001
"""The rank polls when rank 0 does, but not more often than this."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a command that rank 0 waits for."""

    value: Any = None
    error: BatonError | None = None


class _Channel:
    """One end of the socket. Raises OSError or EOFError when the other end has closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)
        self.send = connection.send
        self.close = connection.close

    def receive(self, seconds: float) -> Any:
        """The next value, if one comes in time."""
        return self._connection.recv() if self._poller.poll(seconds * 1000) else None


class ShardProxy:
    """Rank 0's end: drives the shard at the other end of `connection` as if it were here."""

    def __init__(self, connection: Connection) -> None:
        self._channel = _Channel(connection)
        self._events: list[TransportEvent] = []
        self._broken = ""  # why the rank cannot be reached any more
        self._polled_at = 0.0
        self._later: list[PageWrite] = []  # their pages are not complete yet

    def register(self, layout: PoolLayout) -> PoolShard:
        """Makes the shard reachable; once, before anything else. Raises the rank's error."""
        self._send("register", layout)
        shard: PoolShard = self._wait(REGISTER_SECONDS)
        return shard

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        self._send("connect", address, part)
        self._wait(ANSWER_SECONDS)
        return address.agent

    def disconnect(self, peer: str) -> None:
        self._send("disconnect", peer)

    def write(self, write: PageWrite) -> int:
        """As `Transport.write`, but a refused write is reported as WriteFailed.

        The rank cannot wait for an event of rank 0's device, so `poll` waits for it here.
        """
        if write.ready:
            self._send("write", replace(write, after=None))
        else:
            self._later.append(write)
        return write.number

    def begin_digests(self, pages: Sequence[int], part: PagePart | None) -> None:
        """Requests digests of the shard's part of these pages; `end_digests` waits for them."""
        self._send("digest", pages, part)

    def end_digests(self) -> list[int]:
        """The answer to the oldest unanswered `begin_digests`."""
        digests: list[int] = self._wait(ANSWER_SECONDS)
        return digests

    def poll(self) -> list[TransportEvent]:
        """Raises WorkerLost when the rank is gone."""
        waiting, self._later = self._later, []
        for write in waiting:
            self.write(write)
        if time.monotonic() - self._polled_at >= POLL_SECONDS:
            self._polled_at = time.monotonic()
            self._send("poll")
        while not self._broken and (event := self._receive(0.0)):
            self._events.append(event)
        self._check()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Ends the rank's transfers and waits for it to release its memory. May be repeated."""
        self._send("close")
        deadline = time.monotonic() + CLOSE_SECONDS
        while not self._broken and time.monotonic() < deadline:
            self._receive(deadline - time.monotonic())
        self._broken = self._broken or "it is closed"
        self._channel.close()

    def _check(self) -> None:
        if self._broken:
            raise WorkerLost(f"a rank of this worker cannot be reached: {self._broken}")

    def _send(self, *command: Any) -> None:
        try:
            self._channel.send(command)
        except OSError as error:
            self._broken = self._broken or str(error)

    def _receive(self, seconds: float) -> Any:
        try:
            return self._channel.receive(seconds)
        except (EOFError, OSError) as error:
            self._broken = str(error) or "it has closed its socket"
            return None

    def _wait(self, seconds: float) -> Any:
        """The answer to the last command, or its error. Events are kept for `poll`."""
        deadline = time.monotonic() + seconds
        while not self._broken and (left := deadline - time.monotonic()) > 0:
            report = self._receive(left)
            if isinstance(report, _Answer):
                if report.error is not None:
                    raise report.error
                return report.value
            if report is not None:
                self._events.append(report)
        self._broken = self._broken or f"no answer for {seconds:g} seconds"
        return self._check()


def serve_shard(
    connection: Connection,
    transport: SlicingTransport,
    memory: PoolMemory,
    heads: HeadRange,
) -> None:
    """Runs a rank's end until rank 0 closes or ends, then closes the transport."""
    channel = _Channel(connection)
    server = _ShardServer(channel, transport, memory, heads)
    with suppress(EOFError, OSError):
        while server.step():
            pass
    transport.close()
    channel.close()


class _ShardServer:
    """Runs rank 0's commands on the shard's transport."""

    def __init__(
        self,
        channel: _Channel,
        transport: SlicingTransport,
        memory: PoolMemory,
        heads: HeadRange,
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._memory = memory
        self._heads = heads
        self._registered = False
        self._page_digest: PageDigest | None = None  # made when it is first needed
        self._writes: set[int] = set()  # under way
        self._active_at = 0.0
        self._answered_commands: dict[str, Callable[..., Any]] = {
            "register": self._register,
            "connect": transport.connect,
            "digest": self._digest,
        }

    def step(self) -> bool:
        """Handles a command, if one comes soon, and reports events. False after "close"."""
        match self._channel.receive(self._pause()):
            case ("close",):
                return False
            case ("write", write):
                self._write(write)
            case ("disconnect", peer):
                self._transport.disconnect(peer)
            case (name, *arguments) if name in self._answered_commands:
                self._channel.send(self._answer(name, arguments))
        for event in self._transport.poll() if self._registered else []:
            self._report(event)
        return True

    def _pause(self) -> float:
        if not self._writes:
            return IDLE_PAUSE_SECONDS
        return polling_pause(time.monotonic() - self._active_at, self._memory.device)

    def _answer(self, name: str, arguments: list[Any]) -> _Answer:
        try:
            return _Answer(self._answered_commands[name](*arguments))
        except BatonError as error:
            return _Answer(error=error)

    def _register(self, layout: PoolLayout) -> PoolShard:
        pool = self._transport.register(self._memory, layout)
        self._registered = True
        pool.ClearField("layout")  # it is in the whole pool's address
        first, count = self._heads
        return PoolShard(first_head=first, heads=count, pool=pool)

    def _digest(self, pages: Sequence[int], part: PagePart | None) -> list[int]:
        if self._page_digest is None:
            self._page_digest = choose_digest("on", self._memory)
        assert self._page_digest is not None
        return self._page_digest(pages, part)

    def _write(self, write: PageWrite) -> None:
        try:
            self._transport.write(write)
        except BatonError as error:
            self._channel.send(WriteFailed(write.number, error))
        else:
            self._active_at = time.monotonic()
            self._writes.add(write.number)

    def _report(self, event: TransportEvent) -> None:
        if isinstance(event, WriteDone | WriteFailed):
            self._writes.discard(event.write)
        if not isinstance(event, Noted):  # such as a peer's probe
            self._channel.send(event)

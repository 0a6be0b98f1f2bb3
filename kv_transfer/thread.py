"""The transfer thread: one thread of a worker that owns the transport.

Commands come in through a queue, from the engine thread or any other; events go
out through a callback. Everything else here belongs to the thread alone.

A transport cannot be waited for, only polled. While a write is under way or a
reservation is open the thread pauses between polls for a fiftieth of the time
that nothing has happened: what it adds to a wait is at most 2% of it, and long
waits cost the cores next to nothing. Else it polls only often enough to let
peers connect.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from baton.v1.transfer_pb2 import PoolAddress, PoolLayout
from core.types import AttemptKey
from kv_transfer.events import TransferCrashed, TransferEvent
from kv_transfer.pushes import Pushes
from kv_transfer.reservations import Reservations
from kv_transfer.transport import (
    Noted,
    PeerLost,
    PoolMemory,
    Transport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)

GRACE_SECONDS = 60.0
"""How long after its ticket's expiry a quarantined reservation may still be written to."""

IDLE_PAUSE_SECONDS = 0.05
SHORTEST_PAUSE_SECONDS = 0.0002
LONGEST_PAUSE_SECONDS = 0.01
PAUSE_SHARE = 0.02
STOP_SECONDS = 5.0

_Command = Callable[[], None]

_log = logging.getLogger(__name__)


class TransferThread:
    """Moves pages for one worker. Methods return at once and may be called from any thread."""

    def __init__(
        self,
        transport: Transport,
        memory: PoolMemory,
        layout: PoolLayout,
        deliver: Callable[[TransferEvent], None],
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """`deliver` is called on the transfer thread and must not block."""
        self._transport = transport
        self._memory = memory
        self._layout = layout
        self._deliver = deliver
        self._pushes = Pushes(transport, layout, memory.page_bytes, deliver)
        self._reservations = Reservations(grace_seconds, deliver)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._address: Future[PoolAddress] = Future()
        self._pause = 0.0
        self._active_at = 0.0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    @property
    def pool_address(self) -> PoolAddress:
        """How prefill workers reach this worker's pool. Known once `start` has returned."""
        return self._address.result()

    def start(self) -> None:
        """Starts the transport and returns when the pool is reachable. Raises why it is not."""
        self._thread.start()
        self._address.result()

    def stop(self) -> None:
        """Cancels every push, waits a few seconds for writes under way, closes the transport."""
        if self._thread.is_alive():
            self._post(self._begin_stop)
            self._thread.join()

    # On a prefill worker.

    def connect(self, worker_id: str, address: PoolAddress) -> None:
        """Gets ready to push to a decode worker -> PeerConnected."""
        self._post(partial(self._pushes.connect, worker_id, address))

    def open_push(self, key: AttemptKey, peer: str) -> None:
        """Begins a push to the agent `peer` -> exactly one PushEnded, in the end."""
        self._post(partial(self._pushes.begin, key, peer))

    def deliver_ticket(self, key: AttemptKey, sealed: bytes) -> None:
        """Where the pages of a push go. Without an open push the receiver is told Drained."""
        self._post(partial(self._pushes.ticket, key, sealed))

    def push_pages(self, key: AttemptKey, pages: Sequence[int]) -> None:
        """Local pages that are complete now, in the prompt's order, after those given before.

        On a GPU: the kernels that write them have finished, for a transport knows no streams.
        """
        self._post(partial(self._pushes.pages, key, tuple(pages)))

    def finish_push(self, key: AttemptKey, first_token: int, pages: Sequence[int] = ()) -> None:
        """Compute is over, and `pages` are the last ones."""
        finished_at = time.monotonic()
        self._post(partial(self._pushes.finish, key, first_token, tuple(pages), finished_at))

    def cancel_push(self, key: AttemptKey) -> None:
        """Starts no more writes; PushEnded comes when those under way have ended."""
        self._post(partial(self._pushes.cancel, key))

    # On a decode worker. The ticket itself is made with kv_transfer.ticket.make_ticket.

    def expect(self, key: AttemptKey, pages: int, expires_after_seconds: float) -> None:
        """`pages` pages are reserved -> Landed, or ReservationFailed and ReservationFreed.

        Must be called before the ticket leaves the worker.
        """
        expires_at = time.monotonic() + expires_after_seconds
        self._post(partial(self._reservations.expect, key, pages, expires_at))

    def release_reservation(self, key: AttemptKey, *, undelivered: bool = False) -> None:
        """The reservation is not wanted any more -> ReservationFreed, once that is safe.

        `undelivered` says that no sender ever got the ticket. A Landed or
        ReservationFailed that was already on its way may come first; ignore it.
        """
        self._post(partial(self._reservations.release, key, undelivered))

    def sender_died(self, key: AttemptKey) -> None:
        """The worker that was to push is known to be dead -> ReservationFreed."""
        self._post(partial(self._reservations.sender_died, key))

    # On the transfer thread.

    def _post(self, command: _Command) -> None:
        self._commands.put(command)

    def _run(self) -> None:
        try:
            self._address.set_result(self._transport.register(self._memory, self._layout))
        except Exception as error:  # noqa: BLE001 - start() raises it on its caller's thread
            self._address.set_exception(error)
            return
        try:
            while not self._stopped():
                self._step()
            self._transport.close()
        except Exception as error:  # noqa: BLE001 - the thread's edge: its worker must hear of it
            _log.exception("the transfer thread crashed")
            self._deliver(TransferCrashed(f"{type(error).__name__}: {error}"))

    def _step(self) -> None:
        commands = self._wait()
        # Polled before the queue is emptied: a note's reservation is then always known, since
        # its expect() was queued before the ticket left.
        events = self._transport.poll()
        commands += self._queued()
        for command in commands:
            command()
        for event in events:
            self._handle(event)
        self._pushes.tick()
        self._reservations.tick()
        self._set_pause(active=bool(commands or events))

    def _wait(self) -> list[_Command]:
        """The next command, if one comes before it is time to poll."""
        deadline = min(self._pushes.deadline, self._reservations.deadline)
        pause = min(self._pause, deadline - time.monotonic())
        try:
            return [self._commands.get(timeout=max(pause, 0.0))]
        except queue.Empty:
            return []

    def _queued(self) -> list[_Command]:
        return [self._commands.get() for _ in range(self._commands.qsize())]

    def _set_pause(self, *, active: bool) -> None:
        now = time.monotonic()
        if active:
            self._active_at = now
            self._pause = 0.0  # a write may have ended while it was started
        elif self._pushes.writing or self._reservations.open:
            share = PAUSE_SHARE * (now - self._active_at)
            self._pause = min(max(share, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        else:
            self._pause = IDLE_PAUSE_SECONDS

    def _handle(self, event: TransportEvent) -> None:
        match event:
            case WriteDone():
                self._pushes.write_done(event.write)
            case WriteFailed():
                self._pushes.write_failed(event.write, event.error)
            case Noted():
                self._reservations.noted(event.note)
            case PeerLost():
                self._pushes.peer_lost(event.peer)

    def _begin_stop(self) -> None:
        self._stop_at = time.monotonic() + STOP_SECONDS
        self._pushes.cancel_all()

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._pushes.open or time.monotonic() >= self._stop_at

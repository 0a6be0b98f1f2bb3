"""The transfer thread: one thread of a worker that owns the transport.

Commands come in through a queue, from any thread; events go out through a
callback. Everything else here belongs to the thread alone.

A transport cannot be waited for, only polled. While a write is under way or a
reservation is open, the thread pauses between polls for 2% of the time since the
last event: a wait gets at most 2% longer, and long waits cost little CPU. For a
pool on a GPU the pause stays short. When idle it polls only often enough for peers
to connect.

`start` runs it on a thread of its own; tests and simulations call `open` and then
`step`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from baton.core.errors import WorkerLost
from baton.core.types import AttemptKey
from baton.kv_transfer.pool_layout import PeerDigest
from baton.kv_transfer.transfer_events import TransferCommand, TransferCrashed, TransferEvent
from baton.kv_transfer.transfer_protocol import TICKET_VERSION, parse_note, seal
from baton.kv_transfer.transfers import Transfers
from baton.kv_transfer.transport import (
    Noted,
    PeerLost,
    PoolMemory,
    Transport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, TicketBody, TransferNote

LEASE_SECONDS = 10.0
"""How long a sender may start writes after an answered beat, and how long either side waits for
a silent peer."""

LINGER_SECONDS = 300.0
"""How long bytes may still arrive after the end of the process that sent them: the kernel keeps
sending, and retries for minutes when the network is cut."""

IDLE_PAUSE_SECONDS = 0.05
SHORTEST_PAUSE_SECONDS = 0.0002
LONGEST_PAUSE_SECONDS = {"cpu": 0.01, "cuda": 0.0002}
PAUSE_SHARE = 0.02
STOP_SECONDS = 5.0

_Posted = tuple[TransferCommand, float]
"""A command, and when it was posted. None in the queue ends the thread."""

_log = logging.getLogger(__name__)


def polling_pause(quiet_seconds: float, device: str) -> float:
    """The pause between two polls after `quiet_seconds` without an event."""
    share = PAUSE_SHARE * quiet_seconds
    return min(max(share, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS[device])


class TransferThread:
    """Moves pages for one worker."""

    def __init__(
        self,
        transport: Transport,
        memory: PoolMemory,
        layout: PoolLayout,
        deliver: Callable[[TransferEvent], None],
        *,
        digest: PeerDigest | None = None,
        lease_seconds: float = LEASE_SECONDS,
        linger_seconds: float = LINGER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` is called on the transfer thread and must not block.

        With `digest`, pages are sent with a digest and checked on arrival.
        """
        self.lease_seconds = lease_seconds
        self._transport = transport
        self._memory = memory
        self._layout = layout
        self._deliver = deliver
        self._digest = digest
        self._clock = clock
        self._linger_seconds = linger_seconds
        self._transfers: Transfers
        self._commands: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._address: Future[PoolAddress] = Future()
        self._pause = 0.0
        self._active_at = 0.0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    @property
    def pool_address(self) -> PoolAddress:
        """The address of this worker's pool, once `start` has returned."""
        return self._address.result()

    def start(self) -> None:
        """Starts the thread and returns when the pool is reachable. Raises the error of `open`."""
        self._thread.start()
        self._address.result()

    def open(self) -> None:
        """Makes the pool reachable. `start` calls this on the thread."""
        address = self._transport.register(self._memory, self._layout)
        address.ticket_version = TICKET_VERSION
        self._transfers = Transfers(
            self._transport,
            address,
            self._digest,
            self.lease_seconds,
            self._linger_seconds,
            self._deliver,
            self._clock,
        )
        self._address.set_result(address)

    def stop(self) -> None:
        """Cancels every push, waits a few seconds for writes under way, closes the transport."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join()

    @property
    def pushes_ahead(self) -> bool:
        """True if PushPages may name pages that are not complete yet."""
        return self._digest is None

    def ticket(
        self, key: AttemptKey, pages: Sequence[int], seconds: float, held_pages: int = 0
    ) -> bytes:
        """A ticket for `pages` of this worker's pool, which follow the prompt's first `held_pages`
        pages. It expires after `seconds`."""
        body = TicketBody(
            request_id=key.request_id,
            epoch=key.epoch,
            agent=self.pool_address.agent,
            held_pages=held_pages,
            pages=pages,
            expires_after_seconds=seconds,
            lease_seconds=self.lease_seconds,
        )
        return seal(body, self.pool_address.layout)

    def post(self, command: TransferCommand) -> None:
        """Queues a command. May be called from any thread, and returns at once."""
        self._commands.put((command, self._clock()))

    def _run(self) -> None:
        try:
            self.open()
        except Exception as error:  # noqa: BLE001 - start() raises it on its caller's thread
            self._address.set_exception(error)
            return
        try:
            while not self._stopped():
                self.step(self._pause)
            self._transport.close()
        except WorkerLost as error:  # a rank of this worker; the worker reports more about it
            self._deliver(TransferCrashed(error.message))
        except Exception as error:  # noqa: BLE001 - the thread's edge: the worker must know
            _log.exception("the transfer thread crashed")
            self._deliver(TransferCrashed(f"{type(error).__name__}: {error}"))

    def step(self, pause: float) -> None:
        """One round: commands (waiting up to `pause` seconds for one), events, deadlines."""
        commands = self._wait(pause)
        # Polled before the queue is emptied: a note's reservation is then always known, since
        # its ExpectPages was posted before the ticket left.
        events = self._transport.poll()
        commands += self._queued()
        notes = self._settle(events)
        for command in commands:
            self._carry_out(command)
        for peer, note in notes:
            self._transfers.on_note(peer, note)
        self._transfers.tick()
        self._set_pause(active=bool(commands or events))

    @property
    def deadline(self) -> float:
        """When a step has something to do even if nothing arrives."""
        return self._transfers.deadline

    def _wait(self, pause: float) -> list[_Posted | None]:
        """The next command, if one comes within `pause` and before the deadline."""
        if pause:
            pause = max(0.0, min(pause, self.deadline - self._clock()))
        try:
            return [self._commands.get(timeout=pause)]
        except queue.Empty:
            return []

    def _queued(self) -> list[_Posted | None]:
        return [self._commands.get() for _ in range(self._commands.qsize())]

    def _set_pause(self, *, active: bool) -> None:
        now = self._clock()
        if active:
            self._active_at = now
            self._pause = 0.0  # a write may have ended while it was started
        elif self._transfers.expecting:
            self._pause = polling_pause(now - self._active_at, self._memory.device)
        else:
            self._pause = IDLE_PAUSE_SECONDS

    def _settle(self, events: list[TransportEvent]) -> list[tuple[str, TransferNote]]:
        """Handles ended writes, lost peers and introductions; returns the notes of attempts.

        Peers are connected before anything is sent. Otherwise a connection that breaks now could
        be replaced before its PeerLost is polled, which would then be taken for the new one's.
        """
        notes: list[tuple[str, TransferNote]] = []
        introductions: list[tuple[str, TransferNote]] = []
        for event in events:
            match event:
                case WriteDone(write):
                    self._transfers.write_ended(write)
                case WriteFailed(write, error):
                    self._transfers.write_ended(write, error)
                case PeerLost(peer, gone):
                    self._transfers.peer_lost(peer, gone=gone)
                case Noted() if note := parse_note(event.note):
                    introduced = note.HasField("introduction")
                    (introductions if introduced else notes).append((event.peer, note))
        for peer, note in introductions:
            self._transfers.peers.introduced(peer, note.introduction.pool)
        return notes

    def _carry_out(self, posted: _Posted | None) -> None:
        if posted is None:
            self._stop_at = self._clock() + STOP_SECONDS
            self._transfers.cancel_pushes()
        else:
            self._transfers.carry_out(*posted)

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._transfers.pushing or self._clock() >= self._stop_at

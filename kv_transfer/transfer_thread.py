"""The transfer thread: one thread of a worker that owns the transport.

Commands come in through a queue, from the engine thread or any other; events go
out through a callback. Everything else here belongs to the thread alone.

A transport cannot be waited for, only polled. While a write is under way or a
reservation is open the thread pauses between polls for a fiftieth of the time
that nothing has happened: what it adds to a wait is at most 2% of it, and long
waits cost the cores next to nothing. Where the pool is a GPU's, whose time is
dearer than a core's, it never pauses for long. Else it polls only often enough
to let peers connect.

`start` runs it on a thread of its own; whoever wants to drive it by hand calls
`open` and then `step`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from baton.core.errors import WorkerLost
from baton.core.types import AttemptKey, DeviceEvent
from baton.kv_transfer.notes import read_note
from baton.kv_transfer.pool_digest import PeerDigest
from baton.kv_transfer.pushes import Pushes
from baton.kv_transfer.reservations import Reservations
from baton.kv_transfer.ticket import TICKET_VERSION
from baton.kv_transfer.transfer_events import TransferCrashed, TransferEvent
from baton.kv_transfer.transport import (
    Noted,
    PeerLost,
    PoolMemory,
    Transport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, TransferNote

LEASE_SECONDS = 10.0
"""How long a sender may start writes after a beat that was answered, and how long either
side waits for a silent other."""

LINGER_SECONDS = 300.0
"""How long bytes that a process has sent may still arrive after its end: its host's kernel sends
on, and where the network is cut, tries for minutes."""

IDLE_PAUSE_SECONDS = 0.05
SHORTEST_PAUSE_SECONDS = 0.0002
LONGEST_PAUSE_SECONDS = {"cpu": 0.01, "cuda": 0.0002}
PAUSE_SHARE = 0.02
STOP_SECONDS = 5.0

_Command = Callable[[], None]

_log = logging.getLogger(__name__)


def polling_pause(quiet_seconds: float, device: str) -> float:
    """Between two polls for something that is to come, where nothing has come for so long."""
    share = PAUSE_SHARE * quiet_seconds
    return min(max(share, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS[device])


class TransferThread:
    """Moves pages for one worker. Methods return at once and may be called from any thread."""

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

        With `digest` every page that is sent carries one, and every page that
        arrives with one is checked.
        """
        self.lease_seconds = lease_seconds
        self._transport = transport
        self._memory = memory
        self._layout = layout
        self._deliver = deliver
        self._digest = digest
        self._clock = clock
        self._pushes: Pushes
        self._reservations = Reservations(
            transport, digest, lease_seconds, linger_seconds, deliver, clock
        )
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

    def open(self) -> None:
        """Makes the pool reachable. `start` does this on the thread."""
        address = self._transport.register(self._memory, self._layout)
        address.ticket_version = TICKET_VERSION
        self._pushes = Pushes(self._transport, address, self._digest, self._deliver, self._clock)
        self._address.set_result(address)

    def stop(self) -> None:
        """Cancels every push, waits a few seconds for writes under way, closes the transport."""
        if self._thread.is_alive():
            self._post(self._begin_stop)
            self._thread.join()

    # On a prefill worker.

    def connect(self, worker_id: str, address: PoolAddress) -> None:
        """Gets ready to push to a decode worker -> PeerConnected."""
        self._post(partial(self._connect, worker_id, address))

    def open_push(self, key: AttemptKey, peer: str) -> None:
        """Begins a push to the agent `peer` -> exactly one PushEnded, in the end."""
        self._post(partial(self._pushes.begin, key, peer))

    def deliver_ticket(self, key: AttemptKey, sealed: bytes) -> None:
        """Where the pages of a push go. Without an open push the receiver is told Drained."""
        self._post(partial(self._pushes.ticket, key, sealed))

    @property
    def pushes_ahead(self) -> bool:
        """Whether pages may be given that are not complete yet."""
        return self._digest is None

    def push_pages(
        self, key: AttemptKey, pages: Sequence[int], after: DeviceEvent | None = None
    ) -> None:
        """Local pages, in the prompt's order, after those given before.

        They are complete now, on a GPU too; or, where `pushes_ahead`, once `after` has passed.
        """
        self._post(partial(self._pushes.pages, key, tuple(pages), after))

    def finish_push(self, key: AttemptKey, first_token: int, pages: Sequence[int] = ()) -> None:
        """Compute is over, and `pages` are the last ones."""
        finished_at = self._clock()
        self._post(partial(self._pushes.finish, key, first_token, tuple(pages), finished_at))

    def cancel_push(self, key: AttemptKey) -> None:
        """Starts no more writes; PushEnded comes when those under way have ended."""
        self._post(partial(self._pushes.cancel, key))

    def fetch(
        self,
        key: AttemptKey,
        holder: str,
        ticket: bytes,
        pages: Sequence[int],
        page_keys: Sequence[bytes],
        seconds: float,
    ) -> None:
        """Has the agent `holder` fill the first of `pages`, which the ticket is for, with what it
        has cached of `page_keys` -> Fetched, or ReservationFailed and -Freed.

        After `seconds` it has failed.
        """
        command = partial(self._reservations.fetch, key, holder, ticket, tuple(pages))
        self._post(partial(command, tuple(page_keys), self._clock() + seconds))

    # On a decode worker. The ticket itself is made with kv_transfer.ticket.make_ticket.

    def expect(
        self, key: AttemptKey, sender: str, pages: Sequence[int], expires_after_seconds: float
    ) -> None:
        """`pages` wait for the agent `sender` -> Arrived, or ReservationFailed and -Freed.

        Must be called before the ticket leaves the worker.
        """
        expires_at = self._clock() + expires_after_seconds
        self._post(partial(self._reservations.expect, key, sender, tuple(pages), expires_at))

    def release_reservation(self, key: AttemptKey) -> None:
        """The reservation is not wanted any more -> ReservationFreed, once that is safe.

        A Arrived or ReservationFailed that was already on its way may come
        first; ignore it.
        """
        self._post(partial(self._reservations.release, key))

    def lend(self, key: AttemptKey, peer: str, ticket: bytes, pages: Sequence[int]) -> None:
        """Answers PagesWanted with the first so many pages -> exactly one PushEnded, in the end."""
        self._post(partial(self._pushes.lend, key, peer, ticket, tuple(pages)))

    def decline(self, key: AttemptKey, ticket: bytes) -> None:
        """Answers PagesWanted: none are here."""
        self.deliver_ticket(key, ticket)

    # On either.

    def sender_died(self, agent: str) -> None:
        """A sender's process is known to have ended -> ReservationFreed for all its pages, once
        nothing that it had sent can arrive any more."""
        self._post(partial(self._reservations.sender_died, agent))

    # On the transfer thread.

    def _post(self, command: _Command) -> None:
        self._commands.put(command)

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
        except WorkerLost as error:  # a rank of this worker; the worker knows more about it
            self._deliver(TransferCrashed(error.message))
        except Exception as error:  # noqa: BLE001 - the thread's edge: its worker must hear of it
            _log.exception("the transfer thread crashed")
            self._deliver(TransferCrashed(f"{type(error).__name__}: {error}"))

    def step(self, pause: float) -> None:
        """One round: commands (waiting up to `pause` seconds for one), events, deadlines."""
        commands = self._wait(pause)
        # Polled before the queue is emptied: a note's reservation is then always known, since
        # its expect() was queued before the ticket left.
        events = self._transport.poll()
        commands += self._queued()
        notes = self._settle(events)
        for command in commands:
            command()
        for peer, note in notes:
            self._hear(peer, note)
        self._pushes.tick()
        self._reservations.tick()
        self._set_pause(active=bool(commands or events))

    @property
    def deadline(self) -> float:
        """When a step has something to do even if nothing comes."""
        return min(self._pushes.deadline, self._reservations.deadline)

    def _wait(self, pause: float) -> list[_Command]:
        """The next command, if one comes before it is time to poll."""
        if pause:
            pause = max(0.0, min(pause, self.deadline - self._clock()))
        try:
            return [self._commands.get(timeout=pause)]
        except queue.Empty:
            return []

    def _queued(self) -> list[_Command]:
        return [self._commands.get() for _ in range(self._commands.qsize())]

    def _set_pause(self, *, active: bool) -> None:
        now = self._clock()
        if active:
            self._active_at = now
            self._pause = 0.0  # a write may have ended while it was started
        elif self._pushes.expecting or self._reservations.open:
            self._pause = polling_pause(now - self._active_at, self._memory.device)
        else:
            self._pause = IDLE_PAUSE_SECONDS

    def _settle(self, events: list[TransportEvent]) -> list[tuple[str, TransferNote]]:
        """Takes in what has ended and who is there; returns the notes about attempts.

        Peers are connected before anything is sent. Else a connection that breaks now could
        be replaced before its PeerLost is polled, which would then seem to be about the new one.
        """
        notes: list[tuple[str, TransferNote]] = []
        introductions: list[tuple[str, TransferNote]] = []
        for event in events:
            match event:
                case WriteDone():
                    self._pushes.write_done(event.write)
                case WriteFailed():
                    self._pushes.write_failed(event.write, event.error)
                case PeerLost():
                    self._pushes.peer_lost(event.peer)
                    self._reservations.sender_lost(event.peer, gone=event.gone)
                case Noted() if note := read_note(event.note):
                    introduced = note.HasField("introduction")
                    (introductions if introduced else notes).append((event.peer, note))
        for peer, note in introductions:
            self._reservations.introduced(peer, note.introduction.pool)
        return notes

    def _connect(self, worker_id: str, address: PoolAddress) -> None:
        if self._pushes.connect(worker_id, address, self._reservations.senders):
            self._reservations.connected(address)

    def _hear(self, peer: str, note: TransferNote) -> None:
        if note.WhichOneof("kind") in ("beat", "arrived", "drained"):
            self._reservations.noted(peer, note)
        else:
            self._pushes.noted(peer, note)

    def _begin_stop(self) -> None:
        self._stop_at = self._clock() + STOP_SECONDS
        self._pushes.cancel_all()

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._pushes.open or self._clock() >= self._stop_at

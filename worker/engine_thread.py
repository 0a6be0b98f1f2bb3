"""The thread that owns the device, the pool and the scheduler.

Plain values come in through its inbox, messages go out through the outbox. It
waits for nothing but its inbox, and only when idle.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from baton.kv_transfer.transfer_events import TransferEvent
from baton.v1 import worker_pb2 as pb
from baton.worker.outbox import CacheFeed, Outbox
from baton.worker.phase import AnyPhase

IDLE_REPORT_SECONDS = 1.0
BUSY_REPORT_SECONDS = 0.1
# After the drain time: to hand requests back and let their transfers end.
HAND_BACK_SECONDS = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FromRouter:
    attachment: int
    message: pb.RouterMessage
    # The engine handles it between two steps; the time until then is queueing.
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Attached:
    """A router has attached and waits for a first report."""

    attachment: int


@dataclass(frozen=True, slots=True)
class Detached:
    attachment: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new requests; hand the others back after `seconds`.

    `done` resolves to "" when no request is left; with `retire`, to "" when the phase has ended
    with nothing in flight, or to the reason why it continues.
    """

    seconds: float
    retire: bool = False
    done: Future[str] = field(default_factory=Future)


class Wake:
    """Wakes an idle thread: the phase has something to check before its next step."""


class Stop:
    """The last item in the inbox."""


Item = FromRouter | Attached | Detached | Drain | Wake | TransferEvent
EngineInbox = queue.SimpleQueue[Item | Stop]
MakePhase = Callable[[], tuple[AnyPhase, CacheFeed]]


class EngineThread(threading.Thread):
    """Runs one phase after another, each until it has retired, until Stop.

    An exception of a phase ends the thread, since the phase's state is unknown, and `on_failure`
    is called with it.
    """

    def __init__(
        self, inbox: EngineInbox, outbox: Outbox, on_failure: Callable[[BaseException], object]
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._phases: queue.SimpleQueue[tuple[MakePhase, Future[None]] | None] = queue.SimpleQueue()
        self._inbox = inbox
        self._outbox = outbox
        self._on_failure = on_failure
        self._reported = math.inf
        self._began = 0.0
        self._busy_seconds = 0.0
        self._fault = ""
        self.requests = 0  # running or waiting, as last reported
        self._drain: Drain | None = None
        self._hand_back_at = math.inf
        self._give_up_at = math.inf

    def problem(self, stall_seconds: float) -> str:
        """Returns why the engine cannot be used, "" if it can. Thread-safe."""
        if time.monotonic() - self._reported > stall_seconds:
            return f"the engine has made no progress for {stall_seconds:g} seconds"
        return self._fault

    def run_phase(self, make_phase: MakePhase) -> Future[None]:
        """Queues a phase, to run when the one before has retired. The future resolves when the
        phase is ready."""
        ready: Future[None] = Future()
        self._phases.put((make_phase, ready))
        return ready

    def leave(self) -> None:
        """Ends the thread once the phase has retired."""
        self._phases.put(None)

    def run(self) -> None:
        try:
            while order := self._phases.get():
                make_phase, ready = order
                phase, self._cache_feed = make_phase()
                self._begin(phase)
                _resolve(ready, None)
                retired = self._serve(phase)
                if retired is None:
                    break
                self._reported = math.inf
                _resolve(retired.done, "")
        except BaseException as error:  # noqa: BLE001 the thread's edge: the process must end
            self._on_failure(error)

    def _begin(self, phase: AnyPhase) -> None:
        self._busy_seconds = 0.0
        self._began = time.monotonic()
        self._report(phase, -math.inf)

    def _serve(self, phase: AnyPhase) -> Drain | None:
        """Returns the drain that retired the phase; None after Stop."""
        busy = False
        while self._handle_inbox(phase, wait=not busy):
            began = time.monotonic()
            busy = phase.step()
            self._busy_seconds += (time.monotonic() - began) * busy
            self._outbox.flush()  # tokens first: the report may have to count all pages
            self._report(phase, BUSY_REPORT_SECONDS if busy else 0.0)
            self._cache_feed.publish(busy=busy)
            drained = self._continue_draining(phase)
            self._outbox.flush()
            if drained is not None and drained.retire:
                return drained
        return None

    def _handle_inbox(self, phase: AnyPhase, *, wait: bool) -> bool:
        """Handles all items in the inbox. Returns False after Stop."""
        try:
            item = self._inbox.get(block=wait, timeout=IDLE_REPORT_SECONDS)
            while True:
                if isinstance(item, Stop):
                    return False
                self._handle(phase, item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _handle(self, phase: AnyPhase, item: Item) -> None:
        match item:
            case FromRouter() if item.message.HasField("resync_cache"):
                self._cache_feed.send_all(item.attachment)
            case FromRouter():
                phase.on_message(item.attachment, item.message, item.arrived)
            case Attached():
                self._report(phase, 0.0)
                self._cache_feed.send_all(item.attachment)
            case Detached():
                phase.on_detach(item.attachment)
            case Drain():
                self._begin_draining(phase, item)
            case Wake():
                pass
            case _:
                phase.on_transfer(item)

    def _begin_draining(self, phase: AnyPhase, drain: Drain) -> None:
        self._drain = drain
        self._hand_back_at = time.monotonic() + drain.seconds
        self._give_up_at = self._hand_back_at + HAND_BACK_SECONDS
        phase.drain()
        self._outbox.broadcast(pb.WorkerMessage(draining=pb.Draining()))

    def _continue_draining(self, phase: AnyPhase) -> Drain | None:
        """Hands requests back and gives up when due. Returns the drain if it has succeeded."""
        drain, now = self._drain, time.monotonic()
        if drain is None:
            return None
        if phase.settled if drain.retire else phase.idle:
            self._drain = None
            if not drain.retire:  # otherwise `run` resolves it
                _resolve(drain.done, "")
            return drain
        if now >= self._hand_back_at:
            self._hand_back_at = math.inf
            phase.hand_back()
        elif drain.retire and now >= self._give_up_at:
            self._drain = None
            phase.resume()
            _resolve(drain.done, "transfers of its pages did not end in time")
        return None

    def _report(self, phase: AnyPhase, interval: float) -> None:
        now = time.monotonic()
        if now - self._reported >= interval:
            self._reported = now
            load = phase.load()
            load.busy_seconds, load.up_seconds = self._busy_seconds, now - self._began
            self._fault = load.fault
            self.requests = load.running + load.waiting
            self._outbox.broadcast(pb.WorkerMessage(load=load))


def _resolve(future: Future[T], result: T) -> None:
    with suppress(InvalidStateError):  # it was cancelled
        future.set_result(result)

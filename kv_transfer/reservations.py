"""All reservations of one decode worker: carries out what their receivers decide.

Used by the transfer thread alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from core.types import AttemptKey
from kv_transfer.events import Landed, ReservationFailed, ReservationFreed, TransferEvent
from kv_transfer.note import read_note
from kv_transfer.receiver import Action, Fail, Free, HandOver, Receiver


class Reservations:
    """The reservations that a sender may still write to."""

    def __init__(self, grace_seconds: float, deliver: Callable[[TransferEvent], None]) -> None:
        self._grace_seconds = grace_seconds
        self._deliver = deliver
        self._receivers: dict[AttemptKey, Receiver] = {}

    @property
    def open(self) -> bool:
        return bool(self._receivers)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        return min((receiver.deadline for receiver in self._receivers.values()), default=math.inf)

    def expect(self, key: AttemptKey, pages: int, expires_at: float) -> None:
        self._receivers[key] = Receiver(pages, expires_at, self._grace_seconds)

    def release(self, key: AttemptKey, undelivered: bool) -> None:
        receiver = self._receivers.get(key)
        if receiver is None:  # it landed or was freed before the worker heard of it
            self._deliver(ReservationFreed(key))
        else:
            self._perform(key, receiver, receiver.release(undelivered=undelivered))

    def sender_died(self, key: AttemptKey) -> None:
        if receiver := self._receivers.get(key):
            self._perform(key, receiver, receiver.sender_died())

    def noted(self, data: bytes) -> None:
        """A sender's note. One of an unknown attempt, such as an older epoch, is dropped."""
        note = read_note(data)
        if note is None:
            return
        key, landed = note
        if receiver := self._receivers.get(key):
            actions = receiver.landed(landed) if landed is not None else receiver.drained()
            self._perform(key, receiver, actions)

    def tick(self) -> None:
        now = time.monotonic()
        if now < self.deadline:
            return
        for key, receiver in list(self._receivers.items()):
            self._perform(key, receiver, receiver.tick(now))

    def _perform(self, key: AttemptKey, receiver: Receiver, actions: Sequence[Action]) -> None:
        if receiver.over:
            del self._receivers[key]
        for action in actions:
            match action:
                case HandOver():
                    self._deliver(Landed(key, action.first_token))
                case Fail():
                    self._deliver(ReservationFailed(key, action.error))
                case Free():
                    self._deliver(ReservationFreed(key))

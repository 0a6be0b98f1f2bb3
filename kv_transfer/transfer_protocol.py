"""The tickets, notes and write lease of a transfer.

A ticket tells a sender which reserved pages of the receiver to write. A sealed ticket
carries its version and the hash of the receiver's layout in front of the body. Both
are checked before the body is decoded, so a sender of another version or layout
never misinterprets page ids.

Version history of the ticket:

    1   request_id, epoch, agent, pages, expires_after_seconds
    2   lease_seconds: a sender writes only under a lease, and asks for it first
    3   held_pages: the receiver already holds the prompt's first pages; `pages` are the rest
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.core.errors import Internal, LayoutMismatch
from baton.core.types import AttemptKey
from baton.kv_transfer.pool_layout import layout_hash
from baton.v1.transfer_pb2 import (
    Accepted,
    Drained,
    PoolLayout,
    Revoked,
    SealedTicket,
    TicketBody,
    TransferNote,
)

TICKET_VERSION = 3
BEATS_PER_LEASE = 5


def seal(body: TicketBody, layout: PoolLayout) -> bytes:
    """Encodes a ticket for pools of this layout."""
    return SealedTicket(
        version=TICKET_VERSION, layout_hash=layout_hash(layout), body=body.SerializeToString()
    ).SerializeToString()


def open_ticket(sealed: bytes, layout: PoolLayout) -> TicketBody:
    """Decodes a ticket for pools of this layout.

    Raises LayoutMismatch for another version or layout, Internal for an invalid ticket.
    """
    envelope = SealedTicket()
    _parse_into(envelope, sealed)
    if envelope.version != TICKET_VERSION:
        raise LayoutMismatch(
            f"the ticket has version {envelope.version}, this worker uses {TICKET_VERSION}"
        )
    if envelope.layout_hash != layout_hash(layout):
        raise LayoutMismatch("the ticket is for a pool with another layout")
    body = TicketBody()
    _parse_into(body, envelope.body)
    if not all(map(math.isfinite, (body.expires_after_seconds, body.lease_seconds))):
        raise Internal("the ticket's times are not finite")
    return body


def _parse_into(message: SealedTicket | TicketBody, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Internal(f"the ticket cannot be parsed: {error}") from error


class WriteLease:
    """The time until which a sender may start writes. Answered beats extend it. Reads no clock."""

    def __init__(self, seconds: float = 0.0, until: float = math.inf) -> None:
        self.seconds = seconds
        self.until = until  # before the first answer: the deadline for it
        self.next_beat = math.inf
        self.beats = 0
        self._sent: dict[int, float] = {}  # unanswered beats, and when they were sent

    def beat(self, now: float) -> int:
        self.beats += 1
        self._sent[self.beats] = now
        self.next_beat = now + self.seconds / BEATS_PER_LEASE
        return self.beats

    def renew(self, number: int) -> bool:
        """Extends the lease. False if beat `number` is not waiting for an answer."""
        if number not in self._sent:
            return False
        self.until = max(self.until, self._sent[number] + self.seconds)
        self._sent = {beat: sent for beat, sent in self._sent.items() if beat > number}
        return True


@dataclass(frozen=True, slots=True)
class SendNote:
    """An action of a sender or receiver: send a note to the peer."""

    note: bytes


def pack_note(key: AttemptKey, note: TransferNote) -> bytes:
    """A note about one attempt; transfer.proto says who sends which."""
    note.request_id, note.epoch = key
    return note.SerializeToString()


def drained_note(key: AttemptKey) -> bytes:
    """Sent by the sender: the push has ended, and none of its writes is under way."""
    return pack_note(key, TransferNote(drained=Drained()))


def revoked_note(key: AttemptKey) -> bytes:
    """Sent by the receiver: the pages are not wanted."""
    return pack_note(key, TransferNote(revoked=Revoked()))


def accepted_note(key: AttemptKey) -> bytes:
    """Sent by the receiver: all pages arrived."""
    return pack_note(key, TransferNote(accepted=Accepted()))


def parse_note(data: bytes) -> TransferNote | None:
    """None when the bytes are no note of a known kind."""
    note = TransferNote()
    try:
        note.ParseFromString(data)
    except DecodeError:
        return None
    return note if note.WhichOneof("kind") else None


def key_of(note: TransferNote) -> AttemptKey:
    return AttemptKey(note.request_id, note.epoch)

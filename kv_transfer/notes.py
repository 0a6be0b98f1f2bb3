"""The notes that two transfer threads exchange, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.core.types import AttemptKey
from baton.v1.transfer_pb2 import (
    Accepted,
    Arrived,
    Beat,
    Drained,
    Fetch,
    Greeting,
    Introduction,
    PoolAddress,
    Renewed,
    Resend,
    Revoked,
    TransferNote,
)


@dataclass(frozen=True, slots=True)
class SendNote:
    """An action of a sender or receiver: send a note to the peer."""

    note: bytes


# From the sender to the receiver.


def introduction_note(pool: PoolAddress) -> bytes:
    """The sender's address, for notes back."""
    return TransferNote(introduction=Introduction(pool=pool)).SerializeToString()


def beat_note(key: AttemptKey, number: int) -> bytes:
    """The sender is alive and wants its lease renewed."""
    return _note(key, TransferNote(beat=Beat(number=number)))


def arrived_note(
    key: AttemptKey, first_token: int, pages: int, digests: Sequence[int] = (), round: int = 0
) -> bytes:
    """Every page is in place, after `round` rounds of resending."""
    arrived = Arrived(first_token=first_token, pages=pages, digests=digests, round=round)
    return _note(key, TransferNote(arrived=arrived))


def drained_note(key: AttemptKey) -> bytes:
    """The push has ended, and none of its writes is under way."""
    return _note(key, TransferNote(drained=Drained()))


# From the receiver to the sender.


def fetch_note(key: AttemptKey, ticket: bytes, page_keys: Sequence[bytes]) -> bytes:
    """Pages with these keys are wanted, under the ticket."""
    return _note(key, TransferNote(fetch=Fetch(ticket=ticket, page_keys=page_keys)))


def greeting_note() -> bytes:
    """The answer to an introduction."""
    return TransferNote(greeting=Greeting()).SerializeToString()


def renewed_note(key: AttemptKey, number: int) -> bytes:
    """The answer to a beat: writes may start."""
    return _note(key, TransferNote(renewed=Renewed(number=number)))


def revoked_note(key: AttemptKey) -> bytes:
    """The pages are not wanted."""
    return _note(key, TransferNote(revoked=Revoked()))


def resend_note(key: AttemptKey, positions: Sequence[int], round: int) -> bytes:
    """These pages arrived damaged."""
    return _note(key, TransferNote(resend=Resend(positions=positions, round=round)))


def accepted_note(key: AttemptKey) -> bytes:
    """All pages arrived."""
    return _note(key, TransferNote(accepted=Accepted()))


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


def _note(key: AttemptKey, note: TransferNote) -> bytes:
    note.request_id, note.epoch = key
    return note.SerializeToString()

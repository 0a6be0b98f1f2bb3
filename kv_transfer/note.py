"""The notes that a sender's writes carry to the receiver, as bytes."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.v1.transfer_pb2 import Drained, Landed, TransferNote
from core.types import AttemptKey


def landed_note(key: AttemptKey, first_token: int, pages: int) -> bytes:
    """Every page is in place."""
    landed = Landed(first_token=first_token, pages=pages)
    return TransferNote(
        request_id=key.request_id, epoch=key.epoch, landed=landed
    ).SerializeToString()


def drained_note(key: AttemptKey) -> bytes:
    """The sender gave up, and none of its writes is under way."""
    return TransferNote(
        request_id=key.request_id, epoch=key.epoch, drained=Drained()
    ).SerializeToString()


def read_note(data: bytes) -> tuple[AttemptKey, Landed | None] | None:
    """Whose note it is, and what landed; None in its place means drained.

    None altogether when the bytes are no note of a kind this version knows.
    """
    note = TransferNote()
    try:
        note.ParseFromString(data)
    except DecodeError:
        return None
    key = AttemptKey(note.request_id, note.epoch)
    match note.WhichOneof("kind"):
        case "landed":
            return key, note.landed
        case "drained":
            return key, None
        case _:
            return None

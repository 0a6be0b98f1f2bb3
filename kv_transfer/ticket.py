"""The ticket: a decode worker's leave to write into pages it has reserved.

A sealed ticket carries its version and the digest of the receiver's layout in
front of the body. Both are checked before the body is decoded, so a sender of
another version or layout never reads page ids it would misunderstand.

Version history:

    1   request_id, epoch, agent, pages, expires_after_seconds
    2   lease_seconds: a sender writes only under a lease, and asks for it first
    3   held_pages: the receiver holds the prompt's front already; `pages` are the rest
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from baton.core.errors import Internal, LayoutMismatch
from baton.core.types import AttemptKey
from baton.kv_transfer.pool_layout import layout_hash
from baton.v1.transfer_pb2 import PoolLayout, SealedTicket, TicketBody

TICKET_VERSION = 3


def make_ticket(
    key: AttemptKey,
    *,
    agent: str,
    held_pages: int = 0,
    pages: Sequence[int],
    expires_after_seconds: float,
    lease_seconds: float,
    layout: PoolLayout,
) -> bytes:
    """The sealed ticket for `pages` of the pool that transport agent `agent` serves.

    They take a prompt's pages from number `held_pages` on.
    """
    body = TicketBody(
        request_id=key.request_id,
        epoch=key.epoch,
        agent=agent,
        held_pages=held_pages,
        pages=pages,
        expires_after_seconds=expires_after_seconds,
        lease_seconds=lease_seconds,
    )
    return seal(body, layout)


def seal(body: TicketBody, layout: PoolLayout) -> bytes:
    return SealedTicket(
        version=TICKET_VERSION, layout_hash=layout_hash(layout), body=body.SerializeToString()
    ).SerializeToString()


def open_ticket(sealed: bytes, layout: PoolLayout) -> TicketBody:
    """The body of a ticket for pools laid out as `layout`.

    Raises LayoutMismatch for another version or layout, Internal for bytes
    that are no ticket, or one that cannot be kept to.
    """
    envelope = SealedTicket()
    _parse(envelope, sealed)
    if envelope.version != TICKET_VERSION:
        raise LayoutMismatch(
            f"the ticket has version {envelope.version}, this worker reads {TICKET_VERSION}"
        )
    if envelope.layout_hash != layout_hash(layout):
        raise LayoutMismatch("the ticket is for a pool that is laid out differently")
    body = TicketBody()
    _parse(body, envelope.body)
    if not all(map(math.isfinite, (body.expires_after_seconds, body.lease_seconds))):
        raise Internal("the ticket's times are not numbers")
    return body


def _parse(message: SealedTicket | TicketBody, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Internal(f"the ticket cannot be read: {error}") from error

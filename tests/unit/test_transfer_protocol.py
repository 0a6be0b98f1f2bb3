from __future__ import annotations

import math

import pytest

from baton.core.errors import BatonError, Internal, LayoutMismatch
from baton.kv_transfer.pool_layout import describe_mismatch, layout_hash
from baton.kv_transfer.transfer_protocol import open_ticket, seal
from baton.v1.transfer_pb2 import PoolLayout, SealedTicket, TicketBody

LAYOUT = PoolLayout(
    version=1, model="m", dtype="float32", page_size=16, layers=2, kv_heads=3, head_dim=64
)


def changed(**fields: object) -> PoolLayout:
    layout = PoolLayout()
    layout.CopyFrom(LAYOUT)
    for name, value in fields.items():
        setattr(layout, name, value)
    return layout


OTHERS = [
    changed(version=2),
    changed(model="n"),
    changed(dtype="bfloat16"),
    changed(page_size=32),
    changed(layers=3),
    changed(kv_heads=2),
    changed(head_dim=128),
]


def test_a_ticket_opens_to_what_was_sealed() -> None:
    body = TicketBody(
        request_id="r",
        epoch=3,
        agent="a",
        pages=[5, 6, 2],
        expires_after_seconds=30,
        lease_seconds=5,
    )
    assert open_ticket(seal(body, LAYOUT), changed()) == body


@pytest.mark.parametrize("other", OTHERS)
def test_a_ticket_for_another_layout_is_refused(other: PoolLayout) -> None:
    with pytest.raises(LayoutMismatch):
        open_ticket(seal(TicketBody(), LAYOUT), other)


def test_the_version_is_checked_before_the_layout_and_the_body() -> None:
    sealed = SealedTicket(version=99, layout_hash=b"?", body=b"\xff").SerializeToString()
    with pytest.raises(LayoutMismatch, match="version 99, this worker uses 3"):
        open_ticket(sealed, LAYOUT)


def test_the_layout_is_checked_before_the_body_is_decoded() -> None:
    sealed = SealedTicket(version=3, layout_hash=b"?", body=b"\xff").SerializeToString()
    with pytest.raises(LayoutMismatch):
        open_ticket(sealed, LAYOUT)


@pytest.mark.parametrize("garbage", [b"\xff", b"hello", b""])
def test_bytes_that_are_no_ticket_are_a_typed_error(garbage: bytes) -> None:
    with pytest.raises(BatonError):
        open_ticket(garbage, LAYOUT)


def test_a_body_that_cannot_be_decoded_is_a_typed_error() -> None:
    envelope = SealedTicket(version=3, layout_hash=layout_hash(LAYOUT), body=b"\xff")
    with pytest.raises(Internal, match="cannot be parsed"):
        open_ticket(envelope.SerializeToString(), LAYOUT)


def test_equal_layouts_have_equal_hashes_and_no_mismatch() -> None:
    assert layout_hash(LAYOUT) == layout_hash(changed())
    assert describe_mismatch(LAYOUT, changed()) == ""


def test_every_field_changes_the_hash() -> None:
    assert len({layout_hash(layout) for layout in [LAYOUT, *OTHERS]}) == len(OTHERS) + 1


def test_a_mismatch_names_the_fields_and_both_values() -> None:
    text = describe_mismatch(LAYOUT, changed(page_size=32, dtype="bfloat16"))
    assert text == (
        "dtype is 'float32' here and 'bfloat16' there; page_size is 16 here and 32 there"
    )


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_ticket_whose_times_are_no_times_is_refused(seconds: float) -> None:
    for body in (TicketBody(lease_seconds=seconds), TicketBody(expires_after_seconds=seconds)):
        with pytest.raises(Internal, match="times"):
            open_ticket(seal(body, LAYOUT), LAYOUT)

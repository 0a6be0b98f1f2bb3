"""Who has fallen silent, and counts no longer as serving."""

from __future__ import annotations

import dataclasses

import pytest
from clocks import Clock

from baton.cluster.census import SILENT, SILENT_SECONDS, Census
from baton.cluster.member import Member
from baton.core.types import Role

WORKER = Member("decode-0", Role.DECODE, "", "ready", "10.0.0.1:5", requests=3)


@pytest.fixture
def census(clock: Clock) -> Census:
    census = Census(clock)
    census.note(WORKER)
    return census


def test_a_member_is_as_it_has_told(census: Census) -> None:
    assert census.now == census.told == [WORKER]
    assert census.serves("decode-0")
    assert census.requests("decode-0") == 3


def test_a_member_that_is_silent_does_not_serve_but_routers_keep_it(
    census: Census, clock: Clock
) -> None:
    clock.now = SILENT_SECONDS + 0.1
    assert not census.serves("decode-0")
    assert [(item.progress, item.address) for item in census.now] == [(SILENT, "")]
    assert census.told == [WORKER]


def test_a_member_that_tells_again_serves_again(census: Census, clock: Clock) -> None:
    clock.now = SILENT_SECONDS + 0.1
    again = dataclasses.replace(WORKER, pid=2)
    assert census.note(again) == WORKER
    assert census.serves("decode-0")


def test_a_member_that_starts_may_be_silent_for_long(census: Census, clock: Clock) -> None:
    starting = dataclasses.replace(WORKER, progress="importing torch", address="")
    census.note(starting)
    clock.now = SILENT_SECONDS + 0.1
    assert census.now == [starting]


def test_whoever_is_not_known_or_forgotten_does_not_serve(census: Census) -> None:
    census.forget("decode-0")
    assert not census.serves("decode-0")
    assert not census.names
    assert census.requests("decode-0") == 0

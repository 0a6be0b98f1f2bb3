"""Which members serve, and which are silent."""

from __future__ import annotations

import dataclasses

import pytest
from clocks import Clock

from baton.cluster.fleet import SILENT, SILENT_SECONDS, Member, MemberTable
from baton.core.types import Role

WORKER = Member("decode-0", Role.DECODE, "", "ready", "10.0.0.1:5", requests=3)


@pytest.fixture
def table(clock: Clock) -> MemberTable:
    table = MemberTable(clock)
    table.report(WORKER)
    return table


def test_a_member_is_as_it_reported(table: MemberTable) -> None:
    assert table.current == [WORKER]
    assert table.latest == {"decode-0": WORKER}
    assert table.serves("decode-0")


def test_a_silent_member_does_not_serve_but_routers_keep_it(
    table: MemberTable, clock: Clock
) -> None:
    clock.now = SILENT_SECONDS + 0.1
    assert not table.serves("decode-0")
    assert [(item.progress, item.address) for item in table.current] == [(SILENT, "")]
    assert table.latest == {"decode-0": WORKER}


def test_a_member_that_reports_again_serves_again(table: MemberTable, clock: Clock) -> None:
    clock.now = SILENT_SECONDS + 0.1
    again = dataclasses.replace(WORKER, pid=2)
    assert table.report(again) == WORKER
    assert table.serves("decode-0")


def test_a_member_that_starts_may_be_silent(table: MemberTable, clock: Clock) -> None:
    starting = dataclasses.replace(WORKER, progress="importing torch", address="")
    table.report(starting)
    clock.now = SILENT_SECONDS + 0.1
    assert table.current == [starting]


def test_a_forgotten_member_does_not_serve(table: MemberTable) -> None:
    table.forget("decode-0")
    assert not table.serves("decode-0")
    assert not table.latest

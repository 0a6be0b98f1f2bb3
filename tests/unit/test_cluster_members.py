"""Which members serve, which are silent, and what is known of those that ended."""

from __future__ import annotations

import dataclasses

import pytest
from clocks import Clock

from baton.cluster.fleet import SILENT, SILENT_SECONDS, EndedProcesses, Member, MemberTable
from baton.core.types import Role
from baton.v1.worker_pb2 import Verdict

WORKER = Member("decode-0", Role.DECODE, "", "ready", "10.0.0.1:5", requests=3)
ON_A = dataclasses.replace(WORKER, node="a", agent="one", incarnation=1)
ON_B = dataclasses.replace(WORKER, node="b", agent="two", incarnation=2)


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


def test_the_first_verdict_on_a_process_is_published() -> None:
    ended = EndedProcesses()
    killed, crashed = Verdict(incarnation=1), Verdict(incarnation=1, crashed=True)
    for verdicts in ([killed], [crashed], [killed, Verdict(incarnation=2)]):
        ended.judge(verdicts)
    assert list(ended.verdicts) == [killed, Verdict(incarnation=2)]


@pytest.mark.parametrize("moved", [False, True], ids=["still known there", "moved since"])
def test_a_lost_node_explains_the_end_of_its_processes_and_accuses_nobody(moved: bool) -> None:
    ended = EndedProcesses()
    if moved:
        ended.note_report(ON_A, ON_B)
    for _ in range(2):
        ended.note_lost_nodes({"a"}, [ON_B if moved else ON_A])
    (verdict,) = ended.verdicts
    assert (verdict.incarnation, list(verdict.suspects)) == (1, [])
    assert verdict.crashed


def test_a_process_on_a_node_that_lives_is_not_judged() -> None:
    ended = EndedProcesses()
    ended.note_report(ON_A, ON_B)
    ended.note_lost_nodes({"c"}, [ON_B])
    assert (list(ended.agents), list(ended.verdicts)) == (["one"], [])

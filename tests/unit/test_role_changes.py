"""Who is about to change its role, and where it is counted meanwhile."""

from __future__ import annotations

import pytest
from clocks import Clock

from baton.cluster.fleet import Fleet
from baton.cluster.role_changes import RoleChanges
from baton.core.types import Role
from baton.planner.sizing import Pools

FLEET = Fleet.of(Pools(2, 2))


@pytest.fixture
def changes(clock: Clock) -> RoleChanges:
    begun = RoleChanges(10.0, clock)
    begun.begin("decode-0", Role.PREFILL)
    return begun


def test_a_worker_counts_where_it_is_going(changes: RoleChanges) -> None:
    assert changes.names(FLEET) == {"decode-0"}
    assert changes.counted(FLEET) == Pools(3, 1)


def test_a_change_is_over_once_the_worker_has_its_new_role(changes: RoleChanges) -> None:
    switched = FLEET.switched("decode-0", Role.PREFILL)
    assert not changes.names(switched)
    assert changes.counted(switched) == switched.wanted == Pools(3, 1)


def test_a_change_is_over_once_the_worker_is_gone(changes: RoleChanges) -> None:
    left = FLEET.without("decode-0")
    assert not changes.names(left)
    assert changes.counted(left) == Pools(2, 1)


def test_a_worker_that_takes_too_long_goes_on_as_it_was(changes: RoleChanges, clock: Clock) -> None:
    clock.now = 10.0
    assert not changes.names(FLEET)
    assert changes.counted(FLEET) == Pools(2, 2)


def test_a_worker_that_retires_counts_nowhere(changes: RoleChanges) -> None:
    retiring = FLEET.scaled(Pools(2, 1), ["decode-0"])
    assert changes.counted(retiring) == Pools(2, 1)

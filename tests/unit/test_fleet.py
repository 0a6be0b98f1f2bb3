"""The wanted workers, as pools are scaled and workers switch roles or leave."""

from __future__ import annotations

import pytest
from clocks import Clock

from baton.cluster.fleet import Fleet, RoleSwitches, dump, parse
from baton.core.types import Role
from baton.planner.sizing import Pools


def fleet(prefill: int, decode: int) -> Fleet:
    return Fleet({}).scaled(Pools(prefill, decode))


def test_workers_are_named_by_their_role_and_a_number() -> None:
    assert fleet(1, 2).workers == {
        "prefill-0": Role.PREFILL,
        "decode-0": Role.DECODE,
        "decode-1": Role.DECODE,
    }


def test_a_pool_that_grows_keeps_its_workers() -> None:
    grown = fleet(1, 1).scaled(Pools(1, 3))
    assert list(grown.workers) == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert not grown.retiring


def test_the_first_spare_workers_retire() -> None:
    spare = ["decode-1", "prefill-0", "decode-2", "decode-0"]
    shrunk = fleet(1, 3).scaled(Pools(1, 1), spare)
    assert shrunk.retiring == {"decode-1", "decode-2"}
    assert shrunk.wanted == Pools(1, 1)


def test_a_retiring_worker_stays_until_it_has_drained() -> None:
    shrunk = fleet(1, 2).scaled(Pools(1, 1), ["decode-1"])
    assert "decode-1" in shrunk.workers
    left = shrunk.without("decode-1")
    assert list(left.workers) == ["prefill-0", "decode-0"]
    assert left.wanted == shrunk.wanted == Pools(1, 1)


def test_a_retiring_worker_is_not_chosen_again() -> None:
    spare = ["decode-2", "decode-1", "decode-0"]
    shrunk = fleet(1, 3).scaled(Pools(1, 2), spare).scaled(Pools(1, 1), spare)
    assert shrunk.retiring == {"decode-2", "decode-1"}


def test_names_are_never_reused() -> None:
    shrunk = fleet(1, 2).scaled(Pools(1, 1), ["decode-1"]).without("decode-1")
    assert list(shrunk.scaled(Pools(1, 2)).workers) == ["prefill-0", "decode-0", "decode-2"]


def test_a_pool_grows_while_workers_retire() -> None:
    grown = fleet(1, 2).scaled(Pools(1, 1), ["decode-1"]).scaled(Pools(1, 2))
    assert grown.retiring == {"decode-1"}
    assert grown.wanted == Pools(1, 2)


def test_a_worker_drained_by_an_operator_is_no_longer_wanted() -> None:
    assert fleet(1, 2).without("decode-0").wanted == Pools(1, 1)


def test_a_pool_is_filled_up_while_an_operator_drains_one_of_its_workers() -> None:
    draining = fleet(1, 2).retired("decode-0")
    assert draining.wanted == Pools(1, 1)
    assert "decode-2" in draining.scaled(Pools(1, 2)).workers


def test_a_worker_that_has_switched_is_wanted_in_its_new_pool() -> None:
    switched = fleet(2, 1).switched("prefill-1", Role.DECODE)
    assert switched.wanted == Pools(1, 2)
    assert switched.scaled(Pools(1, 1), ["prefill-1"]).retiring == {"prefill-1"}
    assert "prefill-2" in switched.scaled(Pools(2, 2)).workers


def test_a_fleet_survives_dump_and_parse() -> None:
    kept = fleet(2, 2).scaled(Pools(1, 3), ["prefill-1"]).switched("decode-0", Role.PREFILL)
    assert parse(dump(kept)) == kept


FLEET = Fleet({}).scaled(Pools(2, 2))


@pytest.fixture
def switches(clock: Clock) -> RoleSwitches:
    begun = RoleSwitches(10.0, clock)
    begun.begin("decode-0", Role.PREFILL)
    return begun


def test_a_worker_that_switches_counts_in_its_new_pool(switches: RoleSwitches) -> None:
    assert switches.names(FLEET) == {"decode-0"}
    assert switches.expected(FLEET) == Pools(3, 1)


def test_a_switch_is_over_once_the_worker_has_its_new_role(switches: RoleSwitches) -> None:
    switched = FLEET.switched("decode-0", Role.PREFILL)
    assert not switches.names(switched)
    assert switches.expected(switched) == switched.wanted == Pools(3, 1)


def test_a_switch_is_over_once_the_worker_is_gone(switches: RoleSwitches) -> None:
    left = FLEET.without("decode-0")
    assert not switches.names(left)
    assert switches.expected(left) == Pools(2, 1)


def test_a_worker_that_takes_too_long_keeps_its_role(switches: RoleSwitches, clock: Clock) -> None:
    clock.now = 10.0
    assert not switches.names(FLEET)
    assert switches.expected(FLEET) == Pools(2, 2)


def test_a_retiring_worker_counts_in_no_pool(switches: RoleSwitches) -> None:
    retiring = FLEET.scaled(Pools(2, 1), ["decode-0"])
    assert switches.expected(retiring) == Pools(2, 1)

"""Workers that change their roles again and again, among all other faults."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from .cluster import Cluster
from .faults import Faults

SEEDS = (range(100), pytest.param(range(100, 400), marks=pytest.mark.faults))


class RestlessFaults(Faults):
    """Every other fault is a change of roles."""

    def _strike(self) -> None:
        worker = self._some_worker()
        if worker is not None and self._world.chance(0.5):
            self._world.log(worker.agent, "CHANGES ITS ROLE")
            worker.switch()
        else:
            super()._strike()


class RestlessCluster(Cluster):
    kind_of_faults = RestlessFaults


@pytest.fixture
def quiet() -> Iterator[None]:
    """Pages that are damaged on purpose are no news."""
    log = logging.getLogger("baton.kv_transfer")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_no_page_is_lost_and_no_token_changes_while_workers_change_their_roles(
    quiet: None, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += RestlessCluster(seed).run()
    assert counts["finished"] > len(seeds)
    assert counts["changes of role"] > len(seeds) / 4
    assert counts["writes into quarantine"] > 0
    assert counts["pages fetched"] > 0

"""Workers that are killed, frozen and drained again and again, some of them by a request: who
merely was there is answered, and whoever crashes workers takes down three at most."""

from __future__ import annotations

from collections import Counter

from baton.core.errors import PoisonRequest

from .cluster import Cluster
from .faults import Faults

SEEDS = 1000


class DeadlyFaults(Faults):
    """More of them, most at processes. Every worker comes back."""

    def __init__(self, cluster: Cluster, due: list[int]) -> None:
        more = [cluster.world.random.randint(1, 400) for _ in range(6 if due else 0)]
        super().__init__(cluster, sorted([*due, *more]))
        cluster.may_lose_workers = False

    def _strike(self) -> None:
        kill, freeze, drain = self._kill_worker, self._freeze_worker, self._drain_worker
        self._world.random.choice((kill, kill, freeze, freeze, drain, super()._strike))()


class DeadlyCluster(Cluster):
    kind_of_faults = DeadlyFaults
    culprits = 0.5


def test_no_innocent_request_is_lost_and_no_culprit_takes_down_more_than_three_workers() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts += DeadlyCluster(seed).run()
    print(counts)
    assert counts["finished"] > SEEDS
    assert counts[PoisonRequest.reason] > SEEDS / 20
    assert counts["crashes"] > counts[PoisonRequest.reason]

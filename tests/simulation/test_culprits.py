"""Workers that are killed, frozen and drained again and again, some of them by a request: who
merely was there is answered, and whoever crashes workers takes down three at most."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from baton.core.errors import PoisonRequest
from baton.router.requests.attempt import AttemptEnded
from baton.router.requests.retries import RetryState
from baton.router.requests.verdicts import Losses
from baton.worker.phase import Phase
from baton.worker.step_record import Row, StepRecord

from .cluster import Cluster
from .faults import Faults
from .test_mutations import Patch, fail_some_seed
from .test_roles import SEEDS

RARE = {"share_the_steps_of_suspects": 37, "count_drained_attempts": 1458}
"""As in test_mutations.py; seed 15 sees the others."""


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


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_no_innocent_request_is_lost_and_no_culprit_takes_down_more_than_three_workers(
    seeds: range,
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += DeadlyCluster(seed).run()
    print(counts)
    assert counts["finished"] > len(seeds)
    assert counts[PoisonRequest.reason] > len(seeds) / 20
    assert counts["crashes"] > counts[PoisonRequest.reason]


def ignore_verdicts(patch: Patch) -> None:
    """Nobody learns how workers ended."""
    patch.setattr(Losses, "judge", lambda self, verdicts: None)


def wait_for_no_verdict(patch: Patch) -> None:
    """A request is judged before it is known how its worker ended."""
    patch.setattr(RetryState, "awaits_verdict", False)


def acquit_everybody(patch: Patch) -> None:
    """A crash passes for a kill from outside."""
    patch.setattr(StepRecord, "crash", lambda self, error: None)


def note_steps_too_late(patch: Patch) -> None:
    """The rows of a step are noted when it has ended."""
    begin, end = StepRecord.begin, StepRecord.end
    noted: dict[StepRecord, Sequence[Row]] = {}

    def remember(self: StepRecord, rows: Sequence[Row]) -> None:
        noted[self] = rows

    def late(self: StepRecord) -> None:
        begin(self, noted[self])
        end(self)

    patch.setattr(StepRecord, "begin", remember)
    patch.setattr(StepRecord, "end", late)


def share_the_steps_of_suspects(patch: Patch) -> None:
    """Who is to run alone runs in steps with others."""
    patch.setattr(Phase, "_run_alone", lambda self, plan: plan)


def count_drained_attempts(patch: Patch) -> None:
    """A request fails that draining workers have handed back often enough."""
    end = RetryState.end

    def counted(self: RetryState, ended: AttemptEnded) -> None:
        end(self, ended)
        self._uncounted = 0

    patch.setattr(RetryState, "end", counted)


MUTATIONS: list[Callable[[Patch], None]] = [
    ignore_verdicts,
    wait_for_no_verdict,
    acquit_everybody,
    note_steps_too_late,
    share_the_steps_of_suspects,
    count_drained_attempts,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mistake_about_culprits_is_caught(
    mutate: Callable[[Patch], None], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "baton.kv_transfer")
    mutate(monkeypatch)
    fail_some_seed(DeadlyCluster, RARE.get(mutate.__name__, 15))

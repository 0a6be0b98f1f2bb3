"""Steps under way: launched in order, settled in order.

Where the engine runs beside the host, one step stays under way while the host
hears of the one before: the device never waits for a plan.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import DeviceEvent, Logprobs
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.engine.step import FinishedStep, InFlightStep, Outcome, Plan, Scored
from baton.worker.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step did for one sequence."""

    sequence: Sequence
    outcome: int | BatonError | None
    computed: int  # tokens whose K/V the sequence's pages hold since
    logprobs: Logprobs | None = None  # of the token, where the sequence asks for it


@dataclass(frozen=True, slots=True)
class _UnderWay:
    plan: Plan
    computed: list[int]
    flight: InFlightStep
    began: float


class InflightSteps:
    def __init__(self, engine: Engine, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._under_way: deque[_UnderWay] = deque()

    @property
    def any(self) -> bool:
        return bool(self._under_way)

    @property
    def last_end(self) -> DeviceEvent | None:
        """When the step launched last is done, if the device is still at it."""
        return self._under_way[-1].flight.ended if self._under_way else None

    def advance(self, plan: Plan) -> list[Settled]:
        """Launches a step, if there is one to launch, and settles those before it.

        Without a step to launch, all that are under way are settled.
        """
        if plan:
            self._launch(plan)
        runs_on = plan and not isinstance(self._under_way[-1].flight, FinishedStep)
        keep = 1 if runs_on else 0
        settled: list[Settled] = []
        while len(self._under_way) > keep:
            settled += self._settle(self._under_way.popleft())
        return settled

    def _launch(self, plan: Plan) -> None:
        began = time.monotonic()
        flight = launch(self._engine, plan)
        computed = [piece.sequence.computed for piece in plan]
        self._under_way.append(_UnderWay(plan, computed, flight, began))

    def _settle(self, step: _UnderWay) -> list[Settled]:
        outcomes = step.flight.wait()
        seconds = time.monotonic() - step.began
        self._metrics.step(len(step.plan), sum(piece.count for piece in step.plan), seconds)
        self._note_compute(step.plan, seconds)
        return [
            _settled(piece.sequence, outcome, computed)
            for piece, outcome, computed in zip(step.plan, outcomes, step.computed, strict=True)
        ]

    def _note_compute(self, plan: Plan, seconds: float) -> None:
        """How long prompts take, for the second tier to compare with."""
        tier = self._engine.pool.second_tier
        tokens = sum(piece.count for piece in plan if piece.count > 1)
        if tier is not None and tokens >= self._engine.pool.page_size:
            tier.costs.compute.note(tokens, seconds)


def _settled(sequence: Sequence, outcome: Outcome, computed: int) -> Settled:
    if isinstance(outcome, Scored):
        return Settled(sequence, outcome.token, computed, outcome.logprobs)
    return Settled(sequence, outcome, computed)


def launch(engine: Engine, plan: Plan) -> InFlightStep:
    """Launches a plan so that a request which breaks the engine breaks alone.

    A typed error (such as logits that are not numbers) leaves every sequence
    as it was, so each piece of a failed step is tried again by itself.
    """
    try:
        return engine.launch(plan)
    except BatonError as error:
        if len(plan) == 1:
            return FinishedStep([error])
        return FinishedStep(
            [outcome for piece in plan for outcome in launch(engine, [piece]).wait()]
        )

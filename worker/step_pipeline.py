"""The engine's in-flight steps: launched in order, settled in order.

On a GPU one step stays in flight while the host settles the one before, so the device does
not wait for a plan. Plans with guesses are the exception: they need the tokens in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.core.errors import BatonError
from baton.core.types import DeviceEvent
from baton.engine.engine import Engine
from baton.engine.second_tier import second_tier_of
from baton.engine.sequence import Sequence
from baton.engine.step import Checked, Drawn, FinishedStep, InFlightStep, Outcome, Plan
from baton.worker.metrics import WorkerMetrics
from baton.worker.step_record import StepRecord


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step did for one sequence."""

    sequence: Sequence
    computed: int  # tokens whose K/V is now in the sequence's pages
    drawn: list[Drawn] = field(default_factory=list)  # the sampled tokens
    guesses: int = 0  # guesses that the step ran; all sampled tokens but one were guessed
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: Plan
    rows: int
    computed: list[int]  # `Settled.computed` of each sequence, without accepted guesses
    step: InFlightStep
    began: float
    idle: float | None  # seconds that the device waited before the step; None: it did not wait


LONGEST_IDLE = 0.05
"""A device that is idle for more seconds between two steps had nothing to run."""

OnStep = Callable[[int, float, bool], None]
"""Gets the rows and seconds of a step that only decodes, and whether the device waited for it;
the seconds include that wait."""


class StepPipeline:
    def __init__(self, engine: Engine, metrics: WorkerMetrics, record: StepRecord) -> None:
        self._engine = engine
        self._metrics = metrics
        self.on_step: OnStep | None = None
        self.record = record
        self._settled_at = 0.0
        self._launched: deque[_Launched] = deque()

    @property
    def any(self) -> bool:
        return bool(self._launched)

    @property
    def last_end(self) -> DeviceEvent | None:
        """The event that marks the end of the latest step; None if no step is in flight."""
        return self._launched[-1].step.ended if self._launched else None

    def advance(self, plan: Plan) -> Iterator[Settled]:
        """Launches the plan's step and settles those before it. Without a plan, settles all.

        The record counts a step as ended when the caller has committed all its results.
        """
        if plan:
            self._launch(plan)
        in_flight = plan and not isinstance(self._launched[-1].step, FinishedStep)
        while len(self._launched) > (1 if in_flight else 0):
            yield from self._settle(self._launched.popleft())
            self.record.end()

    def _launch(self, plan: Plan) -> None:
        rows = sum(count + len(sequence.guesses) for sequence, count in plan.items())
        began = time.monotonic()
        gap = began - self._settled_at
        idle = gap if not self._launched and gap < LONGEST_IDLE else None
        computed = [sequence.computed + count for sequence, count in plan.items()]
        self.record.begin(list(plan))
        step = launch(self._engine, plan)
        self._launched.append(_Launched(plan, rows, computed, step, began, idle))

    def _settle(self, launched: _Launched) -> list[Settled]:
        plan, outcomes = launched.plan, launched.step.wait()
        # The device begins a step when the one before has ended.
        began, self._settled_at = max(launched.began, self._settled_at), time.monotonic()
        seconds = self._settled_at - began
        self._metrics.step(len(plan), launched.rows, seconds)
        if self.on_step and max(plan.values()) == 1:
            idle = launched.idle
            self.on_step(launched.rows, seconds + (idle or 0.0), idle is not None)
        self._observe_compute(plan, seconds)
        return list(map(_settled, plan, launched.computed, outcomes))

    def _observe_compute(self, plan: Plan, seconds: float) -> None:
        """Updates the cost of computing prompts, which the second tier compares with restoring."""
        tier = second_tier_of(self._engine.pool)
        tokens = sum(count for count in plan.values() if count > 1)
        if tier is not None and tokens >= self._engine.pool.page_size:
            tier.costs.compute.add(tokens, seconds)


def _settled(sequence: Sequence, computed: int, outcome: Outcome) -> Settled:
    if isinstance(outcome, BatonError):
        return Settled(sequence, computed, error=outcome)
    if isinstance(outcome, Checked):
        right = len(outcome.drawn) - 1
        return Settled(sequence, computed + right, outcome.drawn, outcome.guesses)
    return Settled(sequence, computed, [] if outcome is None else [outcome])


def launch(engine: Engine, plan: Plan) -> InFlightStep:
    """Launches a plan so that a request which breaks the engine fails alone.

    A typed error (such as logits that are not numbers) leaves every sequence as it was. So each
    sequence of a failed step is run again by itself, without guesses, since a wrong guess must
    not fail it.
    """
    try:
        return engine.launch(plan)
    except BatonError as error:
        guesses = [guess for sequence in plan for guess in sequence.take_guesses()]
        if len(plan) == 1 and not guesses:
            return FinishedStep([error])
        return FinishedStep(
            [launch(engine, {sequence: count}).wait()[0] for sequence, count in plan.items()]
        )

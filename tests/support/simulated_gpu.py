"""A GPU on which two models run, by the clock of a simulation: what their steps cost, and how often
a draft's guesses are right, is a test's choice. All that decides about guesses is real."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from baton.core.types import AttemptKey, Logprobs, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Outcome, Plan, Scored, check_guesses, with_guesses

VOCABULARY = 1000
PAGES, PAGE_SIZE, CONTEXT = 20_000, 16, 4096

Cost = Callable[[int, int], float]
"""Seconds of a step, by its sequences and rows."""


class SimulatedGpu:
    """Steps run one after the other; a launch takes the host some time."""

    def __init__(self) -> None:
        self.now = 1.0
        self.free_at = 0.0

    def monotonic(self) -> float:
        return self.now

    def run(self, host: float, device: float) -> float:
        """Launches a step. Returns when it will have ended."""
        self.now += host
        self.free_at = max(self.now, self.free_at) + device
        return self.free_at


def token_at(sequence: Sequence, place: int) -> int:
    """The token that the main model draws."""
    return zlib.crc32(f"{sequence.work.key.request_id} {place}".encode()) % VOCABULARY


class SimulatedStep:
    ended = None

    def __init__(self, gpu: SimulatedGpu, plan: Plan, end: float, drawn: list[Outcome]) -> None:
        self._gpu, self._plan, self._end, self._drawn = gpu, plan, end, drawn
        self._draws = [sequence.samples(count) for sequence, count in plan.items()]
        for sequence, count in plan.items():
            sequence.launched(count)

    def wait(self) -> list[Outcome]:
        self._gpu.now = max(self._gpu.now, self._end)
        for sequence, draws, drawn in zip(self._plan, self._draws, self._drawn, strict=True):
            sequence.expected -= draws
            sequence.take_guesses()
            if isinstance(drawn, tuple) and not isinstance(drawn, Scored):
                sequence.computed += len(drawn.drawn) - 1
        return self._drawn


class SimulatedEngine:
    """`right` is None for the main model, else the share of right guesses."""

    runs_ahead = True
    context_length = CONTEXT
    architecture = SimpleNamespace(vocabulary_size=VOCABULARY)
    gpu = GpuSettings(max_batch=128)

    def __init__(
        self, gpu: SimulatedGpu, host: Cost, device: Cost, right: float | None = None
    ) -> None:
        self.pool = PagePool(PAGES, PAGE_SIZE)
        self._gpu, self._host, self._device, self._right = gpu, host, device, right
        self._draw = random.Random(0)

    def guide(self, work: Work) -> None:
        return None

    def launch(self, plan: Plan) -> SimulatedStep:
        drawn = [self._outcome(*chunk) for chunk in plan.items()]
        shape = len(plan), sum(with_guesses(plan).values())
        end = self._gpu.run(self._host(*shape), self._device(*shape))
        return SimulatedStep(self._gpu, plan, end, drawn)

    def _outcome(self, sequence: Sequence, count: int) -> Outcome:
        if not sequence.samples(count):
            return None
        place = len(sequence.tokens) + sequence.expected
        token = token_at(sequence, place)
        if self._right is not None:
            wrong = self._draw.random() >= self._right
            return Scored((token + wrong) % VOCABULARY, Logprobs(math.log(0.2), (), ()))
        guesses = sequence.guesses
        if not guesses:
            return token
        tokens = [token_at(sequence, place + ahead) for ahead in range(len(guesses) + 1)]
        return check_guesses(guesses, list(tokens))


def works(count: int, prompt: int, answer: int) -> list[Work]:
    draw = random.Random(1)
    return [
        Work(
            AttemptKey(str(number), 1),
            [draw.randrange(VOCABULARY) for _ in range(prompt)],
            Sampling(),
            answer,
            frozenset(),
        )
        for number in range(count)
    ]


def as_engine(engine: SimulatedEngine) -> Engine:
    return cast(Engine, cast(Any, engine))

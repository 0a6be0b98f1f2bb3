"""A decode worker's loop around one engine: its scheduler and its step pipeline."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from baton.core.types import AttemptKey, Role, Sampling, Work
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.decode_worker.speculation import Speculation
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.engine.step import token_and_logprobs
from baton.worker.metrics import WorkerMetrics
from baton.worker.step_pipeline import Settled, StepPipeline
from baton.worker.step_record import StepRecord

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: list[list[int]]
    most_tokens: int
    stops: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY

    def works(self) -> list[Work]:
        return [
            Work(
                AttemptKey(str(number), 1),
                prompt,
                replace(self.sampling, seed=number),
                self.most_tokens,
                self.stops,
            )
            for number, prompt in enumerate(self.prompts)
        ]


@dataclass(slots=True)
class Run:
    """All answers to some prompts, and the time after their first tokens."""

    answers: list[list[int]]
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    accepted: int = 0
    together: float = 0.0  # tokens per second until the first answer ends

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DecodeLoop:
    def __init__(
        self,
        engine: Engine,
        load: Workload,
        speculation: Speculation | None,
        max_batch: int,
        chunk_tokens: int,
    ) -> None:
        self._scheduler = DecodeScheduler(engine.pool, max_batch, chunk_tokens, speculation)
        self._pipeline = StepPipeline(engine, WorkerMetrics("bench", Role.DECODE), StepRecord())
        self._pipeline.on_step = self._note_step if speculation else None
        self._speculation = speculation
        self._paused, self._ended_at = 0.0, time.perf_counter()  # other loops run in a pause
        self._sequences = [Sequence.queued(work, engine.pool) for work in load.works()]
        self._ended: set[Sequence] = set()
        for sequence in self._sequences:
            self._scheduler.compute(sequence)
        self.run = Run([])

    def _note_step(self, rows: int, seconds: float, waited: bool) -> None:
        assert self._speculation
        self._speculation.note_step(rows, seconds - self._paused * waited, waited)

    def step(self) -> bool:
        """Runs a step. False when all answers are complete."""
        run, began = self.run, time.perf_counter()
        self._paused = began - self._ended_at
        prompts = any(not each.generated for each in self._sequences)
        plan, in_flight = self._scheduler.next(), self._pipeline.any
        for settled in self._pipeline.advance(plan):
            if settled.sequence not in self._ended:
                self._commit(settled)
        run.steps += bool(plan)
        self._ended_at = time.perf_counter()
        run.seconds += self._ended_at - began
        if not self._ended:
            run.together = run.rate
        if prompts:
            self.run = Run([])
        run.answers = [each.tokens[each.prompt_length :] for each in self._sequences]
        return bool(plan) or in_flight

    def finish(self) -> Run:
        while self.step():
            pass
        return self.run

    def _commit(self, settled: Settled) -> None:
        sequence, run = settled.sequence, self.run
        tokens = [token_and_logprobs(each)[0] for each in settled.drawn]
        finish = sequence.append(*tokens) if tokens else None
        sequence.settle(settled.computed)
        run.guessed += settled.guesses
        run.accepted += len(tokens) - 1 if settled.guesses else 0
        run.tokens += len(tokens)
        if finish:
            self._scheduler.remove(sequence)
            self._ended.add(sequence)

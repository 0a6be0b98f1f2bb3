"""A decode worker's loop around one engine: its scheduler and its pipeline of steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

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


@dataclass(slots=True)
class Run:
    """All answers to some prompts, and the time after their first tokens."""

    answers: list[list[int]]
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DecodeLoop:
    def __init__(
        self, engine: Engine, speculation: Speculation | None, max_batch: int, chunk_tokens: int
    ) -> None:
        self._engine = engine
        self._scheduler = DecodeScheduler(engine.pool, max_batch, chunk_tokens, speculation)
        self._pipeline = StepPipeline(engine, WorkerMetrics("bench", Role.DECODE), StepRecord())
        self._pipeline.on_step = speculation.note_step if speculation else None
        self._ended: set[Sequence] = set()

    def run(self, load: Workload) -> Run:
        sequences = [self._submit(load, number) for number in range(len(load.prompts))]
        run = Run([])
        began = 0.0
        while (plan := self._scheduler.next()) or self._pipeline.any:
            for settled in self._pipeline.advance(plan):
                if settled.sequence not in self._ended:
                    self._commit(settled, run)
            run.steps += bool(plan)
            if not began and all(each.generated for each in sequences):
                began, run.tokens, run.steps = time.perf_counter(), 0, 0
        run.seconds = time.perf_counter() - began
        run.answers = [each.tokens[each.prompt_length :] for each in sequences]
        return run

    def _submit(self, load: Workload, number: int) -> Sequence:
        key = AttemptKey(str(number), 1)
        work = Work(key, load.prompts[number], load.sampling, load.most_tokens, load.stops)
        sequence = Sequence.queued(work, self._engine.pool)
        self._scheduler.compute(sequence)
        return sequence

    def _commit(self, settled: Settled, run: Run) -> None:
        sequence, tokens = settled.sequence, [token_and_logprobs(d)[0] for d in settled.drawn]
        finish = sequence.append(*tokens) if tokens else None
        sequence.settle(settled.computed)
        run.guessed += settled.guesses
        run.accepted += len(tokens) - 1 if settled.guesses else 0
        run.tokens += len(tokens)
        if finish:
            self._scheduler.remove(sequence)
            self._ended.add(sequence)

"""A decode worker's loop with guesses that are right as often as a test wants."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import Mock

from tiny_models import VOCABULARY

from baton.core.types import AttemptKey, Logprobs, Sampling, Work
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.decode_worker.speculation import Speculation, covered
from baton.engine.engine import Engine
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Plan, token_and_logprobs
from baton.worker.step_pipeline import Settled, StepPipeline

ANSWER = 20
KEY = AttemptKey("", 0)
WARM = Sampling(temperature=1.0, seed=3)
SAMPLINGS = [
    Sampling(),
    WARM,
    Sampling(temperature=1.3, top_p=0.9, top_k=40, min_p=0.01, seed=5),
    Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    Sampling(temperature=0.8, frequency_penalty=1.0, logit_bias=((5, 4.0), (9, -5.0)), seed=2),
    Sampling(no_repeat_ngram_size=2, bad_words_ids=((4,), (7, 8)), suppress_tokens=(1, 2)),
    Sampling(temperature=1.0, min_tokens=12, seed=9),
]


def works(
    samplings: list[Sampling], stops: frozenset[int] = frozenset(), answer: int = ANSWER
) -> list[Work]:
    draw = random.Random(1)
    return [
        Work(
            KEY,
            [draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 6, 23, 60)))],
            sampling,
            answer,
            stops,
            logprobs=number % 3 if number % 2 else None,
        )
        for number, sampling in enumerate(samplings)
    ]


class Answered(NamedTuple):
    tokens: list[int]
    logprobs: list[Logprobs | None]
    prompt_scores: list[Logprobs]


Answers = list[Answered]


class Knowing(Speculation):
    """Knows the answers and guesses up to five tokens of each, each wrong with a chance of
    `wrong`."""

    def __init__(self, answers: Answers, wrong: float, vocabulary: int) -> None:
        super().__init__()
        self._answers = [each.tokens for each in answers]
        self._wrong = wrong
        self._vocabulary = vocabulary
        self._draw = random.Random(7)

    def waits(self, plan: Plan, most_rows: int) -> bool:
        return any(each.expected for each in plan) and self._draw.random() < 0.7

    def guess(self, plan: Plan, most_rows: int, pool: PagePool, pages: int) -> None:
        if any(each.expected for each in plan):
            return
        for sequence in plan:
            if sequence.uncomputed > 1:
                continue
            answer = self._answers[int(sequence.work.key.request_id)]
            left = sequence.work.max_tokens - sequence.generated - 1
            depth = min(self._draw.randrange(6), most_rows, left)
            guesses = answer[sequence.generated : sequence.generated + depth]
            guesses = [self._maybe_wrong(each) for each in guesses]
            guesses = [each for each in guesses if each not in sequence.work.stop_token_ids]
            guesses = covered(sequence, guesses, pool, pages)
            if sequence.guide and guesses:
                guesses = sequence.guide.look_ahead(guesses)
            sequence.guesses = guesses
            most_rows -= len(guesses)

    def _maybe_wrong(self, token: int) -> int:
        wrong = self._draw.random() < self._wrong
        return self._draw.randrange(self._vocabulary) if wrong else token


class Loop:
    """Requests with local prefill, as a decode worker runs them."""

    def __init__(
        self,
        engine: Engine,
        speculation: Speculation | None = None,
        *,
        max_batch: int = 64,
        chunk_tokens: int = 256,
    ) -> None:
        self.engine = engine
        self.scheduler = DecodeScheduler(engine.pool, max_batch, chunk_tokens, speculation)
        self.guesses = self.accepted = self.most_guesses = self.preempted = 0
        self._pipeline = StepPipeline(engine, Mock(), Mock())
        if speculation:
            self._pipeline.on_step = speculation.note_step
        self._ended: set[Sequence] = set()
        self._logprobs: dict[Sequence, list[Logprobs | None]] = {}

    def answer(self, works: list[Work]) -> Answers:
        before = self.engine.pool.leased
        sequences = [
            self._begin(replace(each, key=AttemptKey(str(number), 1)))
            for number, each in enumerate(works)
        ]
        while self.step():
            pass
        assert self.engine.pool.leased == before, "all pages came back"
        assert not self.engine.pool.check_integrity(held=before)
        return [
            Answered(each.tokens[each.prompt_length :], self._logprobs[each], each.prompt_scores)
            for each in sequences
        ]

    def _begin(self, work: Work) -> Sequence:
        sequence = Sequence.queued(work, self.engine.pool)
        sequence.set_guide(self.engine.guide(work))
        self._logprobs[sequence] = []
        self.scheduler.compute(sequence)
        return sequence

    def step(self) -> bool:
        plan = self.scheduler.next()
        if not plan and not self._pipeline.any:
            return False
        self.preempted += bool(self.scheduler._preempted)
        self.most_guesses = max(self.most_guesses, sum(len(each.guesses) for each in plan))
        for settled in self._pipeline.advance(plan):
            if settled.sequence not in self._ended:
                self._commit(settled)
        return True

    def _commit(self, settled: Settled) -> None:
        sequence = settled.sequence
        assert settled.error is None
        if settled.guesses:
            self.guesses += settled.guesses
            self.accepted += len(settled.drawn) - 1
        drawn = list(map(token_and_logprobs, settled.drawn))
        self._logprobs[sequence] += [logprobs for _, logprobs in drawn]
        finish = sequence.append(*(token for token, _ in drawn)) if drawn else None
        sequence.settle(settled.computed)
        if finish:
            self.scheduler.remove(sequence)
            self._ended.add(sequence)

"""A step in flight on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

import torch
from torch import Tensor

from baton.core.errors import Internal
from baton.engine.gpu.upload import record_event
from baton.engine.logprobs import PromptRow, Scores, store_prompt_scores
from baton.engine.pooled_rows import PooledStep
from baton.engine.sampler import NOT_FINITE
from baton.engine.sequence import Sequence
from baton.engine.step import Checked, Drawing, Drawn, Outcome, Plan, outcome_of

FAILED = -1
"""Stands for a token if the logits are not finite."""


class GpuInFlightStep:
    """A step whose sequences have advanced; `wait` returns their tokens and unpins the pages."""

    def __init__(
        self,
        plan: Plan,
        drawing: Drawing,
        tokens: Tensor | None,
        scores: Iterable[Scores[Sequence]] = (),
        prompt_scores: Iterable[Scores[PromptRow]] = (),
        pooled: PooledStep | None = None,
    ) -> None:
        """`tokens` are those sampled for `drawing`, in host memory that the device fills. `scores`
        are of the rows among them that ask for it, `prompt_scores` of rows that do not sample,
        `pooled` of embeddings."""
        self._drawing = drawing
        self._tokens = tokens
        self._scores = scores
        self._prompt_scores = prompt_scores
        self._pooled = pooled
        self._sequences = list(plan)
        self._leases = [sequence.lease for sequence in plan]
        self.ended = record_event() if torch.cuda.is_available() else None
        for sequence, count in plan.items():
            sequence.lease.pin()
            sequence.launched(count)

    def wait(self) -> list[Outcome]:
        if self.ended is not None:
            self.ended.synchronize()
        for lease in self._leases:
            lease.unpin()
        outcomes: dict[Sequence, Outcome] = dict.fromkeys(self._sequences)
        if self._tokens is not None:
            outcomes.update(self._drawn(self._tokens.tolist()))
        store_prompt_scores(self._prompt_scores)
        if self._pooled:
            self._pooled.store()
        for sequence in self._drawing:
            sequence.expected -= 1
            if isinstance(outcome := outcomes[sequence], Checked):
                sequence.computed += len(outcome.drawn) - 1
        return list(outcomes.values())

    def _drawn(self, tokens: list[int]) -> Iterator[tuple[Sequence, Outcome]]:
        rows = (row for ahead in self._drawing.values() for row in ahead)
        drawn: dict[Sequence, Drawn] = dict(zip(rows, tokens, strict=True))
        scored = dict(each for scores in self._scores for each in scores.by_row())
        for sequence, ahead in self._drawing.items():
            # Logits after a wrong guess may be NaN, which must not fail the request.
            finite = list(takewhile(lambda row: drawn[row] != FAILED, ahead))
            outcome = [scored.get(row, drawn[row]) for row in finite]
            guesses = sequence.take_guesses()
            yield sequence, outcome_of(guesses, outcome) if outcome else Internal(NOT_FINITE)

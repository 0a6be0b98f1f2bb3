"""A step in flight on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from baton.core.errors import Internal
from baton.engine.logprobs import PromptRow, Scores, store_prompt_scores
from baton.engine.pooled_rows import PooledStep
from baton.engine.sampler import NOT_FINITE
from baton.engine.sequence import Sequence
from baton.engine.step import Outcome, Plan


class GpuInFlightStep:
    """Its sequences have advanced already; `wait` brings their tokens and unpins the pages."""

    def __init__(
        self,
        plan: Plan,
        sampling: list[Sequence],
        tokens: Tensor | None,
        scores: Iterable[Scores[Sequence]] = (),
        prompt_scores: Iterable[Scores[PromptRow]] = (),
        pooled: PooledStep | None = None,
    ) -> None:
        """`tokens` of the sequences `sampling`, in host memory that the device fills; `scores` of
        the rows among them that ask for them, `prompt_scores` of other rows; `pooled` are those
        of embeddings."""
        self._sampling = sampling
        self._tokens = tokens
        self._scores = scores
        self._prompt_scores = prompt_scores
        self._pooled = pooled
        self._sequences = list(plan)
        self._leases = [sequence.lease for sequence in plan]
        self.ended = _mark_end() if torch.cuda.is_available() else None
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
            for sequence, token in zip(self._sampling, self._tokens.tolist(), strict=True):
                outcomes[sequence] = token if token >= 0 else Internal(NOT_FINITE)
        for sequence, scored in (each for scores in self._scores for each in scores.by_row()):
            if isinstance(outcomes[sequence], int):
                outcomes[sequence] = scored
        store_prompt_scores(self._prompt_scores)
        if self._pooled:
            self._pooled.store()
        for sequence in self._sampling:
            sequence.expected -= 1
        return list(outcomes.values())


def _mark_end() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

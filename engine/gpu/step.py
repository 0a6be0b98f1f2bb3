"""A step in flight on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.errors import Internal
from baton.engine.logprobs import PromptScores, Scores
from baton.engine.sampler import NOT_FINITE
from baton.engine.step import Outcome, Plan


class GpuInFlightStep:
    """Its sequences have advanced already; `wait` brings their tokens and unpins the pages."""

    def __init__(
        self,
        plan: Plan,
        sampling: list[int],
        tokens: Tensor | None,
        scores: Sequence[Scores] = (),
        prompt_scores: Sequence[PromptScores] = (),
    ) -> None:
        """`tokens` of the chunks at `sampling`, in host memory that the device fills; `scores` of
        the rows among them that ask for them, `prompt_scores` of other rows."""
        self._sampled = [plan[index].sequence for index in sampling]
        self._sampling = sampling
        self._tokens = tokens
        self._scores = scores
        self._prompt_scores = prompt_scores
        self._count = len(plan)
        self._leases = [chunk.sequence.lease for chunk in plan]
        self.ended = _mark_end() if torch.cuda.is_available() else None
        for chunk in plan:
            chunk.sequence.lease.pin()
            chunk.launched()

    def wait(self) -> list[Outcome]:
        if self.ended is not None:
            self.ended.synchronize()
        for lease in self._leases:
            lease.unpin()
        outcomes: list[Outcome] = [None] * self._count
        if self._tokens is not None:
            for index, token in zip(self._sampling, self._tokens.tolist(), strict=True):
                outcomes[index] = token if token >= 0 else Internal(NOT_FINITE)
        for row, scored in (each for scores in self._scores for each in scores.by_row()):
            if isinstance(outcomes[self._sampling[row]], int):
                outcomes[self._sampling[row]] = scored
        for prompt_scores in self._prompt_scores:
            prompt_scores.store()
        for sequence in self._sampled:
            sequence.expected -= 1
        return outcomes


def _mark_end() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

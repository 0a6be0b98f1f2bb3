"""A step that runs on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.errors import Internal
from baton.engine.logprobs import PromptScores, Scores
from baton.engine.sampler import NOT_FINITE
from baton.engine.step import Outcome, Plan


class GpuInFlightStep:
    """Its sequences are already as they will be; their tokens come with `wait`.

    The pages it uses are pinned until then.
    """

    def __init__(
        self,
        plan: Plan,
        sampling: list[int],
        tokens: Tensor | None,
        scores: Sequence[Scores] = (),
        prompt_scores: Sequence[PromptScores] = (),
    ) -> None:
        """`tokens` are those of the pieces at `sampling`, in host memory that the device fills;
        `scores` those of the rows among them that ask for it, `prompt_scores` those of others."""
        self._sampled = [plan[index].sequence for index in sampling]
        self._sampling = sampling
        self._tokens = tokens
        self._scores = scores
        self._prompt_scores = prompt_scores
        self._count = len(plan)
        self._leases = [piece.sequence.lease for piece in plan]
        self.ended = _mark_end() if torch.cuda.is_available() else None
        for piece in plan:
            piece.sequence.lease.pin()
            piece.depart()

    def wait(self) -> list[Outcome]:
        if self.ended is not None:
            self.ended.synchronize()
        for lease in self._leases:
            lease.unpin()
        outcomes: list[Outcome] = [None] * self._count
        if self._tokens is not None:
            for index, token in zip(self._sampling, self._tokens.tolist(), strict=True):
                outcomes[index] = token if token >= 0 else Internal(NOT_FINITE)
        for row, scored in (each for scores in self._scores for each in scores.read()):
            if isinstance(outcomes[self._sampling[row]], int):
                outcomes[self._sampling[row]] = scored
        for prompt_scores in self._prompt_scores:
            prompt_scores.keep()
        for sequence in self._sampled:
            sequence.expected -= 1
        return outcomes


def _mark_end() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

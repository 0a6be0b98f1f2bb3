"""The rows of a step that reach the end of the model."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from baton.engine.gpu.batch import Ints
from baton.engine.logprobs import PromptRow, prompt_rows
from baton.engine.sequence import Sequence
from baton.engine.step import Drawing, Plan, drawing_of, with_guesses


class WantedRows(NamedTuple):
    """Rows that sample, those of prompts that are scored, and others of embeddings."""

    samples: Ints
    drawing: Drawing
    sequences: list[Sequence]  # of those that sample
    prompts: list[PromptRow]
    pooled: list[PromptRow]

    @classmethod
    def of(cls, plan: Plan) -> WantedRows:
        """The plan is in the order of its rows."""
        drawing = drawing_of(plan)
        sequences = [row for ahead in drawing.values() for row in ahead]
        others = prompt_rows(plan)
        pooled = [row for row in others if row.sequence.pooled is not None]
        scored = [row for row in others if row.sequence.pooled is None]
        return cls(_sampled_rows(plan), drawing, sequences, scored, pooled)

    @property
    def all(self) -> Ints:
        if not (self.prompts or self.pooled):
            return self.samples
        others = np.array([each.row for each in (*self.prompts, *self.pooled)], dtype=np.int32)
        return np.concatenate((self.samples, others))

    @property
    def owners(self) -> list[Sequence]:
        """The sequence of each wanted row."""
        return self.sequences + [each.sequence for each in (*self.prompts, *self.pooled)]


def _sampled_rows(plan: Plan) -> Ints:
    """The last row of each sequence that samples, and those of its guesses."""
    drawn = [sequence.draws(count) for sequence, count in plan.items()]
    if set(drawn) == {1} and sum(plan.values()) == len(plan):  # all decode, without guesses
        return np.arange(len(plan), dtype=np.int32)
    ends = accumulate(with_guesses(plan).values())
    rows = [range(end - draws, end) for end, draws in zip(ends, drawn, strict=True)]
    return np.array([row for each in rows for row in each], dtype=np.int32)

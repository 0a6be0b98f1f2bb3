"""How likely the tokens of prompts were, for the requests that ask for it.

The row of one token tells how likely the next one was. Most rows of a prompt are
there for their keys and values alone; of a request that asks, all are carried to
the end of the model, and scored a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.logprobs import GROUP, Scores, score_rows
from baton.engine.sequence import Piece


class Wanted(NamedTuple):
    """A row of a step whose logits are wanted: to sample from, or to score a prompt's token."""

    piece: Piece
    position: int
    row: int
    samples: bool

    @property
    def next_token(self) -> int:
        return self.piece.sequence.tokens[self.position + 1]


def wanted_rows(pieces: list[Piece]) -> list[Wanted]:
    """In the order of the step's rows."""
    wanted: list[Wanted] = []
    row = 0
    for piece in pieces:
        start = piece.sequence.computed
        wanted += [Wanted(piece, place, row + place - start, False) for place in piece.scored]
        row += piece.count
        if piece.samples:
            wanted.append(Wanted(piece, start + piece.count - 1, row - 1, True))
    return wanted


def prompt_rows(pieces: list[Piece]) -> list[Wanted]:
    """Of these, those that do not sample."""
    if all(piece.sequence.work.prompt_logprobs is None for piece in pieces):
        return []
    return [each for each in wanted_rows(pieces) if not each.samples]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of some rows of prompts, wherever the step runs."""

    wanted: list[Wanted]
    scores: Scores

    def moved(self, move: Callable[[Tensor], Tensor]) -> PromptScores:
        scores = self.scores
        there = replace(scores, tokens=move(scores.tokens), logprobs=move(scores.logprobs))
        return PromptScores(self.wanted, there)

    def keep(self) -> None:
        """Tells the sequences. The step must have ended."""
        for place, scored in self.scores.read():
            wanted = self.wanted[place]
            wanted.piece.sequence.take_prompt_score(wanted.position, scored.logprobs)


def score_prompts(
    wanted: list[Wanted], logits_of: Callable[[slice], Tensor]
) -> Iterator[PromptScores]:
    """`logits_of` makes the logits [n, V] of some of the rows `wanted`."""
    for start in range(0, len(wanted), GROUP):
        some = wanted[start : start + GROUP]
        logits = logits_of(slice(start, start + GROUP))
        tokens = torch.tensor([each.next_token for each in some], device=logits.device)
        most = [each.piece.sequence.work.prompt_logprobs or 0 for each in some]
        yield PromptScores(some, score_rows(logits, tokens, list(range(len(some))), most))

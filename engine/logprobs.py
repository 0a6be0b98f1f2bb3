"""How likely sampled tokens were, for the sequences that ask for it.

The probabilities are the model's own: of the logits as they are, before
temperature, penalties and biases. Other rows of the step are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.types import Logprobs
from baton.engine.sequence import Sequence
from baton.engine.step import Chunk, Scored

GROUP = 32
"""Rows that are scored together: each takes some 16 bytes a token of the vocabulary."""

LEAST = -9999.0
"""What stands for a token that cannot be, since JSON knows no infinities."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of some rows of a step, wherever the step runs."""

    rows: list[int]  # places among those that sample, or that are scored together
    wanted: list[int]  # likeliest tokens that each is to be told
    tokens: Tensor  # [n, 1 + most], int32: the one that came, then the likeliest
    logprobs: Tensor  # [n, 1 + most], float32

    def read(self) -> Iterator[tuple[int, Scored]]:
        """By row. The step must have ended."""
        told = zip(
            self.rows, self.wanted, self.tokens.tolist(), self.logprobs.tolist(), strict=True
        )
        for row, wanted, (token, *top), (logprob, *others) in told:
            likeliest = Logprobs(logprob, tuple(top[:wanted]), tuple(others[:wanted]))
            yield row, Scored(token, likeliest)


def score(
    logits: Tensor, tokens: Tensor | list[int], sequences: list[Sequence], first: int = 0
) -> list[Scores]:
    """logits [B, V] and tokens [B] of `sequences`, whose rows are counted from `first`."""
    asking = [row for row, each in enumerate(sequences) if each.work.logprobs is not None]
    if not asking:
        return []
    sampled = torch.as_tensor(tokens, dtype=torch.int32)
    groups = (asking[start : start + GROUP] for start in range(0, len(asking), GROUP))
    return [
        score_rows(
            logits[rows],
            sampled[rows],
            [first + row for row in rows],
            [sequences[row].work.logprobs or 0 for row in rows],
        )
        for rows in groups
    ]


def score_rows(logits: Tensor, tokens: Tensor, rows: list[int], wanted: list[int]) -> Scores:
    """logits [n, V] and tokens [n]; the rows are called `rows`."""
    scores = logits.float()
    likeliest = scores.topk(min(max(wanted), scores.shape[1]), dim=-1).indices
    # A token that could not be sampled is -1, and its row is thrown away.
    told = torch.cat((tokens.clamp(min=0).long()[:, None], likeliest), dim=-1)
    logprobs = scores.gather(-1, told) - scores.logsumexp(dim=-1, keepdim=True)
    return Scores(rows, wanted, told.int(), logprobs.clamp(min=LEAST))


class Wanted(NamedTuple):
    """A row of a step whose logits are wanted: to sample from, or to score a prompt's token."""

    piece: Chunk
    position: int
    row: int
    samples: bool

    @property
    def next_token(self) -> int:
        return self.piece.sequence.tokens[self.position + 1]


def wanted_rows(pieces: list[Chunk]) -> list[Wanted]:
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


def prompt_rows(pieces: list[Chunk]) -> list[Wanted]:
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
            wanted.piece.sequence.add_prompt_score(wanted.position, scored.logprobs)


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

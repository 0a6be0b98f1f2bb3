"""Log probabilities of sampled tokens and of prompts, for the requests that ask for them.

They are the model's own: of the logits before temperature, penalties and biases. Rows of
other requests are not touched.

A token's row gives the probability of the next token. Most prompt rows are computed for their
keys and values alone; where a request asks for its prompt's, all its rows reach the end of
the model and are scored a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.types import Logprobs
from baton.engine.sequence import Sequence
from baton.engine.step import Plan, Scored

GROUP = 32
"""Rows scored together: each takes some 16 bytes per token of the vocabulary."""

LEAST = -9999.0
"""Stands for an impossible token, since JSON has no infinities."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of some rows of a step, on its device or the host."""

    rows: list[int]  # places among the sampled rows, or among those scored together
    wanted: list[int]  # number of likeliest tokens that each row asks for
    tokens: Tensor  # [n, 1 + most], int32: the actual token, then the likeliest
    logprobs: Tensor  # [n, 1 + most], float32

    def moved(self, move: Callable[[Tensor], Tensor]) -> Scores:
        return replace(self, tokens=move(self.tokens), logprobs=move(self.logprobs))

    def by_row(self) -> Iterator[tuple[int, Scored]]:
        """The step must have ended."""
        values = (self.rows, self.wanted, self.tokens.tolist(), self.logprobs.tolist())
        for row, wanted, (token, *top), (logprob, *others) in zip(*values, strict=True):
            yield row, Scored(token, Logprobs(logprob, tuple(top[:wanted]), tuple(others[:wanted])))


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
    """logits [n, V] and tokens [n] of the rows `rows`."""
    scores = logits.float()
    likeliest = scores.topk(min(max(wanted), scores.shape[1]), dim=-1).indices
    # A token that could not be sampled is -1; its row is dropped.
    chosen = torch.cat((tokens.clamp(min=0).long()[:, None], likeliest), dim=-1)
    logprobs = scores.gather(-1, chosen) - scores.logsumexp(dim=-1, keepdim=True)
    return Scores(rows, wanted, chosen.int(), logprobs.clamp(min=LEAST))


class WantedRow(NamedTuple):
    """A row of a step whose logits are needed: to sample from, or to score a prompt's token."""

    sequence: Sequence
    position: int
    row: int
    samples: bool

    @property
    def next_token(self) -> int:
        return self.sequence.tokens[self.position + 1]


def wanted_rows(plan: Plan) -> list[WantedRow]:
    """`plan` is in the order of the step's rows, and so are these."""
    wanted: list[WantedRow] = []
    row = 0
    for sequence, count in plan.items():
        first = row - sequence.computed
        wanted += [WantedRow(sequence, at, first + at, False) for at in sequence.scored(count)]
        row += count
        if sequence.samples(count):
            wanted.append(WantedRow(sequence, sequence.computed + count - 1, row - 1, True))
    return wanted


def prompt_rows(plan: Plan) -> list[WantedRow]:
    """The wanted rows that do not sample."""
    if all(sequence.work.prompt_logprobs is None for sequence in plan):
        return []
    return [each for each in wanted_rows(plan) if not each.samples]


class PromptScores(NamedTuple):
    """Scores of some rows of prompts."""

    wanted: list[WantedRow]
    scores: Scores

    def moved(self, move: Callable[[Tensor], Tensor]) -> PromptScores:
        return PromptScores(self.wanted, self.scores.moved(move))

    def store(self) -> None:
        """Adds the scores to their sequences. The step must have ended."""
        for place, scored in self.scores.by_row():
            wanted = self.wanted[place]
            wanted.sequence.add_prompt_score(wanted.position, scored.logprobs)


def score_prompts(
    wanted: list[WantedRow], logits_of: Callable[[slice], Tensor]
) -> Iterator[PromptScores]:
    """`logits_of` makes the logits [n, V] of some of the rows `wanted`."""
    for start in range(0, len(wanted), GROUP):
        some = wanted[start : start + GROUP]
        logits = logits_of(slice(start, start + GROUP))
        tokens = torch.tensor([each.next_token for each in some], device=logits.device)
        most = [each.sequence.work.prompt_logprobs or 0 for each in some]
        yield PromptScores(some, score_rows(logits, tokens, list(range(len(some))), most))

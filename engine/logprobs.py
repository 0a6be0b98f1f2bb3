"""Log probabilities of sampled tokens and of prompts, for the requests that ask for them.

They are computed from the logits before temperature, penalties and biases. Rows of other
requests are not touched.

A token's row gives the probability of the next token. Most prompt rows are computed for their
keys and values alone. If a request asks for log probabilities of its prompt, all its rows run
through the whole model and are scored a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from baton.core.types import Logprobs
from baton.engine.sequence import Sequence
from baton.engine.step import Plan, Scored

GROUP = 32
"""Rows scored together: each takes some 24 bytes per token of the vocabulary."""

LEAST = -9999.0
"""Stands for an impossible token, since JSON has no infinities."""


class PromptRow(NamedTuple):
    """A row of a step that scores the next token of a prompt, or is part of its embedding."""

    sequence: Sequence
    position: int
    row: int
    place: int  # index among the rows whose logits are needed


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Scores(Generic[Row]):
    """Scores of some rows of a step, on its device or the host."""

    rows: list[Row]
    wanted: list[int]  # number of likeliest tokens that each row asks for
    tokens: Tensor  # [n, 1 + most], int32: the actual token, then the likeliest
    logprobs: Tensor  # [n, 1 + most], float32

    def moved(self, move: Callable[[Tensor], Tensor]) -> Scores[Row]:
        return replace(self, tokens=move(self.tokens), logprobs=move(self.logprobs))

    def by_row(self) -> Iterator[tuple[Row, Scored]]:
        """The step must have ended."""
        values = (self.rows, self.wanted, self.tokens.tolist(), self.logprobs.tolist())
        for row, wanted, (token, *top), (logprob, *others) in zip(*values, strict=True):
            yield row, Scored(token, Logprobs(logprob, tuple(top[:wanted]), tuple(others[:wanted])))


def score(
    logits: Tensor, tokens: Tensor | list[int], sequences: list[Sequence]
) -> Iterator[Scores[Sequence]]:
    """Scores the sequences that ask for it. logits [B, V], sampled tokens [B]."""
    asking = [row for row, each in enumerate(sequences) if each.work.logprobs is not None]
    for start in range(0, len(asking), GROUP):
        rows = asking[start : start + GROUP]
        some = [sequences[row] for row in rows]
        sampled = torch.as_tensor(tokens, dtype=torch.int32)
        theirs = logits
        if len(rows) < len(sequences):  # indexing by a list makes a GPU wait
            theirs, sampled = logits[rows], sampled[rows]
        yield _score(theirs, sampled, some, [each.work.logprobs or 0 for each in some])


def score_prompts(
    rows: list[PromptRow], logits_of: Callable[[slice], Tensor]
) -> Iterator[Scores[PromptRow]]:
    """`logits_of` computes the logits [n, V] of some of the rows."""
    for start in range(0, len(rows), GROUP):
        some = rows[start : start + GROUP]
        logits = logits_of(slice(start, start + GROUP))
        actual = [each.sequence.tokens[each.position + 1] for each in some]
        most = [each.sequence.work.prompt_logprobs or 0 for each in some]
        yield _score(logits, torch.tensor(actual, device=logits.device), some, most)


def _score(logits: Tensor, tokens: Tensor, rows: list[Row], wanted: list[int]) -> Scores[Row]:
    """logits [n, V] and tokens [n] of the rows `rows`."""
    scores = logits.float()
    # A token that could not be sampled is -1; its row is dropped.
    chosen = tokens.clamp(min=0).long()[:, None]
    if most := min(max(wanted), scores.shape[1]):
        chosen = torch.cat((chosen, best_tokens(scores, most)), dim=-1)
    # Not by logsumexp: how it sums a row depends on the number of rows and threads.
    logprobs = scores.log_softmax(dim=-1).gather(-1, chosen)
    return Scores(rows, wanted, chosen.int(), logprobs.clamp(min=LEAST))


def best_tokens(scores: Tensor, count: int) -> Tensor:
    """scores [n, V], float32 -> [n, count], the best first.

    On a GPU, which of equal scores topk takes depends on the number of rows, and in bfloat16 many
    are equal. So there each score becomes an integer in the same order, with the token id in its
    low bits. A CPU works row by row, and is 10 times as fast without this.
    """
    if count == 0 or scores.device.type == "cpu":
        return scores.topk(count, dim=-1).indices
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(scores.shape[1], device=scores.device)
    return ((ordered << 32) - ids).topk(count, dim=-1).indices


def prompt_rows(plan: Plan) -> list[PromptRow]:
    """The rows of prompts, in the order of the plan and so of the step's rows."""
    rows: list[PromptRow] = []
    if all(each.work.prompt_logprobs is None and each.pooled is None for each in plan):
        return rows
    row = samples = 0
    for sequence, count in plan.items():
        for position in sequence.needed(count):
            here = row + position - sequence.computed
            rows.append(PromptRow(sequence, position, here, len(rows) + samples))
        drawn = sequence.draws(count)
        row += count + max(0, drawn - 1)
        samples += drawn
    return rows


def store_prompt_scores(scores: Iterable[Scores[PromptRow]]) -> None:
    """Adds the scores to their sequences. The step must have ended."""
    for row, scored in (each for some in scores for each in some.by_row()):
        row.sequence.add_prompt_score(row.position, scored.logprobs)

"""Chooses each sequence's next token from its logits.

A row's token depends on that row's logits and its sequence alone, never on the batch around
it, the worker or the number of threads:

- Each token id has noise of its own, made from (seed, position, token id) by
  kernels/noise.py: no generator has state that a batch, a restart or a handoff could shift.
- Filters sum probabilities as whole numbers (`WEIGHT_ONE` is the most probable token's). Sums
  of integers do not depend on the order of addition; those of floats do.

A drawn row passes: penalties, biases, bans, its grammar's mask, temperature, top-k, top-p, min-p.
Of the tokens that are left, the largest logit / temperature + noise wins, which is a draw from
their softmax. So logits that differ in their last bits give the same token, except with a
probability of about that difference. Each filter sets the least weight that may be drawn, so
tokens of equal weight stay or go together. A row with temperature 0 or top-k 1 takes the best
token, of equals the one with the lowest id.

Bans follow the rules of transformers' logits processors, from the request, the prompt and the
answer's tokens alone, so another worker that continues an answer bans the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.core.errors import Internal
from baton.core.types import Sampling
from baton.engine.sequence import Sequence
from baton.kernels.noise import add_noise, draw_key

WEIGHT_ONE = 2.0**40
"""The weight of a row's best token. A power of two, so scaling by it is exact,
and small enough that 2**22 weights add up within 63 bits."""

NUCLEUS_WIDTH = 1024
"""Number of heaviest tokens that top-p looks at before it sorts the whole vocabulary."""

COLDEST = 1e-10
"""Least temperature that is divided by: float32 represents it, and it leaves only ties."""

NOT_FINITE = "the model's logits are not finite"

_Ids = npt.NDArray[np.int64]
_Part = tuple[_Ids, npt.NDArray[np.floating[Any]]]


class Sampler:
    """Samples token ids below `vocabulary_size`; logits may be padded beyond."""

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """The next token of each sequence. logits: [B, V], any float type; not changed."""
        logits = logits[:, : self.vocabulary_size]
        if all(map(_is_plain, sequences)):
            return _best(logits).tolist()
        scores = logits.to(torch.float32, copy=True)
        adjust(scores, sequences)
        tokens = _best(scores)
        drawing = [row for row, s in enumerate(sequences) if not is_greedy(s.work.sampling)]
        if drawing:
            tokens[drawing] = _draw(_rows(scores, drawing), [sequences[row] for row in drawing])
        return tokens.tolist()


def is_greedy(sampling: Sampling) -> bool:
    """True if the best token is taken, without a draw."""
    return sampling.greedy or sampling.top_k == 1


def is_adjusted(sequence: Sequence) -> bool:
    """True if its logits are changed before a token is chosen."""
    return sequence.work.sampling.adjusts or sequence.guide is not None


def adjust(scores: Tensor, sequences: list[Sequence]) -> None:
    """Changes scores [B, V], float32, in place, on any device."""
    for applies, part_of, change in _ADJUSTMENTS:
        rows = [row for row, each in enumerate(sequences) if applies(each.work.sampling)]
        if rows:
            parts = [part_of(sequences[row]) for row in rows]
            change(scores, *_cells(rows, parts, scores.device))
    _ban(scores, sequences)
    for row_scores, each in zip(scores, sequences, strict=True):
        if each.guide is not None:
            allowed = to_device(torch.from_numpy(each.guide.mask(each.assumed)), scores.device)
            row_scores.masked_fill_(allowed[: len(row_scores)] == 0, -math.inf)


def _ban(scores: Tensor, sequences: list[Sequence]) -> None:
    rows = [row for row, each in enumerate(sequences) if each.work.sampling.bans]
    banned = [banned_tokens(sequences[row], scores.shape[1]) for row in rows]
    if any(map(len, banned)):
        parts = [(tokens, np.full(len(tokens), -np.inf)) for tokens in banned]
        _add(scores, *_cells(rows, parts, scores.device))


def banned_tokens(sequence: Sequence, vocabulary_size: int) -> _Ids:
    """The banned tokens, each once. Bans that would leave no token are lifted: what a grammar
    demands comes even if it repeats itself or ends the answer early."""
    lists = [np.asarray(ids, dtype=np.int64) for ids in _bans(sequence)]
    banned = np.unique(np.concatenate(lists)) if lists else np.empty(0, dtype=np.int64)
    banned = banned[banned < vocabulary_size]
    return banned if _leaves_any(banned, sequence, vocabulary_size) else banned[:0]


def _leaves_any(banned: _Ids, sequence: Sequence, vocabulary_size: int) -> bool:
    if sequence.guide is None or not len(banned):
        return len(banned) < vocabulary_size
    allowed = np.zeros(vocabulary_size, dtype=np.uint8)
    mask = sequence.guide.mask(sequence.assumed)[:vocabulary_size]
    allowed[: len(mask)] = mask
    allowed[banned] = 0
    return bool(allowed.any())


def _bans(sequence: Sequence) -> Iterator[tuple[int, ...] | list[int] | _Ids]:
    """Yields the banned tokens, in several lists."""
    sampling = sequence.work.sampling
    answered = sequence.generated + sequence.expected
    if sampling.suppress_tokens:
        yield sampling.suppress_tokens
    if sampling.begin_suppress_tokens and not answered:
        yield sampling.begin_suppress_tokens
    length = sequence.prompt_length + answered
    if answered < sampling.min_tokens or length < sampling.min_length:
        yield list(sequence.work.stop_token_ids)
    if sampling.bad_words_ids:
        yield [word[-1] for word in sampling.bad_words_ids if _begun(sequence.tokens, word)]
    if sampling.no_repeat_ngram_size:
        yield _repeating(sequence.tokens, sampling.no_repeat_ngram_size)


def _begun(tokens: list[int], word: tuple[int, ...]) -> bool:
    """True if one more token may complete the word."""
    begun = len(word) - 1
    return not begun or (tokens[-1] == word[-2] and tuple(tokens[-begun:]) == word[:-1])


def _repeating(tokens: list[int], size: int) -> _Ids:
    """Tokens that would complete an n-gram of this size which has occurred."""
    known = np.asarray(tokens, dtype=np.int64)
    count = len(known) - size + 1
    if count < 1:
        return known[:0]
    begun = known[len(known) - size + 1 :]
    repeats = np.ones(count, dtype=bool)
    for place, token in enumerate(begun.tolist()):
        repeats &= known[place : place + count] == token
    return known[size - 1 :][repeats]


def _is_plain(sequence: Sequence) -> bool:
    return is_greedy(sequence.work.sampling) and not is_adjusted(sequence)


def _best(scores: Tensor) -> Tensor:
    """scores: [B, V] -> [B], the best token of each row."""
    # max propagates NaN, so the best scores show whether all are finite.
    values, tokens = scores.max(dim=-1)
    if not math.isfinite(sum(values.tolist())):
        raise Internal(NOT_FINITE)
    return tokens


def _cells(rows: list[int], parts: list[_Part], device: torch.device) -> list[Tensor]:
    """Rows, tokens and numbers of some cells of the scores, [N] each; no cell occurs twice."""
    tokens, numbers = zip(*parts, strict=True)
    cells = (
        np.repeat(np.asarray(rows), [len(part) for part in tokens]),
        np.concatenate(tokens),
        np.concatenate(numbers).astype(np.float32),
    )
    return [to_device(torch.from_numpy(part), device) for part in cells]


def _repeated(sequence: Sequence) -> _Part:
    """Each token of prompt and answer once, with the repetition penalty."""
    tokens = np.unique(np.asarray(sequence.tokens, dtype=np.int64))
    return tokens, np.full(len(tokens), sequence.work.sampling.repetition_penalty)


def _answered(sequence: Sequence) -> _Part:
    """Each token of the answer, with its negated presence and frequency penalty."""
    answer = np.asarray(sequence.tokens[sequence.prompt_length :], dtype=np.int64)
    tokens, counts = np.unique(answer, return_counts=True)
    sampling = sequence.work.sampling
    return tokens, -(sampling.presence_penalty + sampling.frequency_penalty * counts)


def _biases(sequence: Sequence) -> _Part:
    tokens, biases = zip(*sequence.work.sampling.logit_bias, strict=True)
    return np.asarray(tokens, dtype=np.int64), np.asarray(biases)


def _apply_repetition(scores: Tensor, rows: Tensor, tokens: Tensor, penalties: Tensor) -> None:
    before = scores[rows, tokens]
    scores[rows, tokens] = torch.where(before > 0, before / penalties, before * penalties)


def _add(scores: Tensor, rows: Tensor, tokens: Tensor, numbers: Tensor) -> None:
    scores[rows, tokens] += numbers


_ADJUSTMENTS: tuple[
    tuple[Callable[[Sampling], object], Callable[[Sequence], _Part], Callable[..., None]], ...
] = (
    (lambda sampling: sampling.penalizes, _repeated, _apply_repetition),
    (lambda sampling: sampling.penalizes, _answered, _add),
    (lambda sampling: sampling.logit_bias, _biases, _add),
)
"""In order: which requests an adjustment applies to, which tokens it changes, and how."""


def draw_keys(sequences: list[Sequence]) -> list[int]:
    """The key of each sequence's noise at its next position; int64."""
    return [draw_key(s.work.sampling.seed, len(s.tokens) + s.expected) for s in sequences]


def _draw(scores: Tensor, sequences: list[Sequence]) -> Tensor:
    """scores: [R, V], changed in place -> [R], one random token per row."""
    samplings = [sequence.work.sampling for sequence in sequences]
    temperatures = _column([max(s.temperature, COLDEST) for s in samplings], scores.device)
    # Subtracting before dividing keeps a tiny temperature from overflowing.
    relative = scores.sub_(scores.amax(dim=-1, keepdim=True)).div_(temperatures)
    rows = [row for row, sampling in enumerate(samplings) if sampling.filters]
    if rows:
        filtered = _rows(relative, rows)
        _filter(filtered, [samplings[row] for row in rows])
        if filtered is not relative:
            relative[rows] = filtered
    keys = torch.tensor(draw_keys(sequences), device=scores.device)
    return add_noise(relative, keys).argmax(dim=-1)


def _filter(relative: Tensor, samplings: list[Sampling]) -> None:
    """Rules out the tokens that filters drop. relative: [R, V], changed in place."""
    # Probabilities as whole numbers.
    weights = relative.exp().mul_(WEIGHT_ONE).floor_()
    for applies, floors in _FILTERS:
        rows = [row for row, each in enumerate(samplings) if applies(each, weights.shape[1])]
        if rows:
            kept = _rows(weights, rows)
            kept.masked_fill_(kept < floors(kept, [samplings[row] for row in rows]), 0.0)
            if kept is not weights:
                weights[rows] = kept
    relative.masked_fill_(weights == 0.0, -math.inf)


def _top_k_floors(weights: Tensor, samplings: list[Sampling]) -> Tensor:
    """The weight of the k-th heaviest token; tokens as heavy stay."""
    last = torch.tensor([[sampling.top_k - 1] for sampling in samplings], device=weights.device)
    most = max(sampling.top_k for sampling in samplings)
    return weights.topk(most, dim=-1).values.gather(-1, last)


def _top_p_floors(weights: Tensor, samplings: list[Sampling]) -> Tensor:
    """The weight with which the heaviest tokens reach the share p of the row's weight."""
    shares = _column([sampling.top_p for sampling in samplings], weights.device, torch.float64)
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.int64)
    needed = torch.minimum((total * shares).to(torch.int64), total)
    heaviest = weights.topk(min(NUCLEUS_WIDTH, weights.shape[1]), dim=-1).values
    reached = heaviest.cumsum(dim=-1, dtype=torch.int64)
    if bool((reached[:, -1:] < needed).any()):
        heaviest = weights.sort(dim=-1, descending=True).values
        reached = heaviest.cumsum(dim=-1, dtype=torch.int64)
    last = (reached < needed).sum(dim=-1, keepdim=True)
    return heaviest.gather(-1, last)


def _min_p_floors(weights: Tensor, samplings: list[Sampling]) -> Tensor:
    """The weight of a token min_p times as probable as the best."""
    return _column([sampling.min_p * WEIGHT_ONE for sampling in samplings], weights.device)


_FILTERS: tuple[
    tuple[Callable[[Sampling, int], bool], Callable[[Tensor, list[Sampling]], Tensor]], ...
] = (
    (lambda sampling, vocabulary: 0 < sampling.top_k < vocabulary, _top_k_floors),
    (lambda sampling, _: sampling.top_p < 1.0, _top_p_floors),
    (lambda sampling, _: sampling.min_p > 0.0, _min_p_floors),
)
"""In order: which requests ask for a filter, and the least weight [R, 1] that it leaves them."""


def _rows(matrix: Tensor, rows: list[int]) -> Tensor:
    """A copy of some rows, or the matrix itself if these are all."""
    return matrix if len(rows) == len(matrix) else matrix[rows]


def _column(
    values: list[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies in the order of the device's stream, without waiting."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

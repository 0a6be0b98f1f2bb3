"""Which tokens may not come next, by the rules of transformers' logits processors.

They follow from the request, the prompt and the answer's tokens alone, so another worker that
continues an answer bans the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from baton.engine.sequence import Sequence

Ids = npt.NDArray[np.int64]


def banned_tokens(sequence: Sequence, vocabulary_size: int) -> Ids:
    """Each once. A ban that would leave no token is lifted: what a grammar demands comes even if
    it repeats itself or ends the answer early."""
    lists = [np.asarray(ids, dtype=np.int64) for ids in _bans(sequence)]
    banned = np.unique(np.concatenate(lists)) if lists else np.empty(0, dtype=np.int64)
    banned = banned[banned < vocabulary_size]
    return banned if _leaves_any(banned, sequence, vocabulary_size) else banned[:0]


def _leaves_any(banned: Ids, sequence: Sequence, vocabulary_size: int) -> bool:
    if sequence.guide is None or not len(banned):
        return len(banned) < vocabulary_size
    allowed = np.zeros(vocabulary_size, dtype=np.uint8)
    mask = sequence.guide.mask(sequence.assumed)[:vocabulary_size]
    allowed[: len(mask)] = mask
    allowed[banned] = 0
    return bool(allowed.any())


def _bans(sequence: Sequence) -> Iterator[tuple[int, ...] | list[int] | Ids]:
    """What is banned now, in several lists."""
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
    """Whether one more token may complete the word."""
    begun = len(word) - 1
    return not begun or (tokens[-1] == word[-2] and tuple(tokens[-begun:]) == word[:-1])


def _repeating(tokens: list[int], size: int) -> Ids:
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

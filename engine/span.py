"""What the model must know of a step, as plain values that can be sent to other ranks."""

from __future__ import annotations

from itertools import chain, islice
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """One sequence's tokens in a step."""

    start: int  # the position of the first
    tokens: list[int]
    pages: list[int]  # of the sequence, up to the last token at least
    wanted: list[int]  # positions whose logits are wanted

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def encode(spans: list[Span]) -> bytes:
    """Numbers of 32 bits: how many spans; the start and three counts of each; then all tokens,
    all pages, and all that is wanted."""
    numbers = [len(spans)]
    for span in spans:
        numbers += (span.start, len(span.tokens), len(span.pages), len(span.wanted))
    for values in chain.from_iterable(zip(*(span[1:] for span in spans), strict=True)):
        numbers += values
    return np.array(numbers, np.int32).tobytes()


def decode(message: bytes) -> list[Span]:
    rest = iter(np.frombuffer(message, np.int32).tolist())
    heads = [list(islice(rest, 4)) for _ in range(next(rest))]
    tokens, pages, wanted = (
        [list(islice(rest, head[field])) for head in heads] for field in (1, 2, 3)
    )
    starts = [head[0] for head in heads]
    return [Span(*fields) for fields in zip(starts, tokens, pages, wanted, strict=True)]

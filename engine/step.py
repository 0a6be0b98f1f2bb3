"""One step over many sequences: the plan, what each chunk needs, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, Protocol

import numpy as np

from baton.core.errors import BatonError, Internal
from baton.core.types import DeviceEvent, Logprobs
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's share of one step: run tokens[computed : computed + count].

    The lease's pages must already cover these positions. When the piece ends
    with the sequence's last token, the step samples the token that follows.
    """

    sequence: Sequence
    count: int

    @property
    def samples(self) -> bool:
        return self.count == self.sequence.uncomputed

    @property
    def scored(self) -> range:
        """The positions at which it is asked how likely the prompt's next token was."""
        sequence = self.sequence
        if sequence.work.prompt_logprobs is None:
            return range(0)
        start = max(sequence.computed, len(sequence.prompt_scores))
        return range(start, min(sequence.computed + self.count, sequence.prompt_length - 1))

    def check(self, page_size: int) -> None:
        """Raises Internal when there is nothing to run, or no page to run it into."""
        sequence = self.sequence
        if not 0 < self.count <= sequence.uncomputed:
            raise Internal(f"a piece of {self.count} of {sequence.uncomputed} tokens")
        if sequence.computed + self.count > len(sequence.lease) * page_size:
            raise Internal("a piece reaches past its sequence's pages")

    def span(self, page_size: int) -> ChunkInputs:
        """What the model must know of it."""
        start, end = self.sequence.computed, self.sequence.computed + self.count
        pages = self.sequence.lease.pages[: -(-end // page_size)]
        wanted = [*self.scored, end - 1] if self.samples else [*self.scored]
        return ChunkInputs(start, self.sequence.tokens[start:end], pages, wanted)

    def depart(self) -> None:
        """The step is under way: the sequence is as it will be when it ends."""
        self.sequence.expected += self.samples
        self.sequence.computed += self.count


Plan = list[Chunk]
"""One step. The runner runs all pieces in one forward pass."""


class Scored(NamedTuple):
    """A sampled token of a sequence that wants to know how likely its tokens are."""

    token: int
    logprobs: Logprobs


Outcome = int | Scored | BatonError | None
"""What a step did for one piece: sampled a token, failed it, or just computed it."""


class InFlightStep(Protocol):
    @property
    def ended(self) -> DeviceEvent | None:
        """When the device has done it; None where it was done when its launch returned."""

    def wait(self) -> list[Outcome]:
        """What the step did for each piece, in the plan's order. Returns when it has ended.

        Called once. The tokens are the caller's to append, before it plans another step.
        """


class FinishedStep:
    """A step that had ended when its launch returned."""

    ended: DeviceEvent | None = None

    def __init__(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    def wait(self) -> list[Outcome]:
        return self._outcomes


class ChunkInputs(NamedTuple):
    """One sequence's tokens in a step."""

    start: int  # the position of the first
    tokens: list[int]
    pages: list[int]  # of the sequence, up to the last token at least
    wanted: list[int]  # positions whose logits are wanted

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def encode_inputs(spans: list[ChunkInputs]) -> bytes:
    """Numbers of 32 bits: how many spans; the start and three counts of each; then all tokens,
    all pages, and all that is wanted."""
    numbers = [len(spans)]
    for span in spans:
        numbers += (span.start, len(span.tokens), len(span.pages), len(span.wanted))
    for values in chain.from_iterable(zip(*(span[1:] for span in spans), strict=True)):
        numbers += values
    return np.array(numbers, np.int32).tobytes()


def decode_inputs(message: bytes) -> list[ChunkInputs]:
    rest = iter(np.frombuffer(message, np.int32).tolist())
    heads = [list(islice(rest, 4)) for _ in range(next(rest))]
    tokens, pages, wanted = (
        [list(islice(rest, head[field])) for head in heads] for field in (1, 2, 3)
    )
    starts = [head[0] for head in heads]
    return [ChunkInputs(*fields) for fields in zip(starts, tokens, pages, wanted, strict=True)]

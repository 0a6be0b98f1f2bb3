"""Cuts a slice of a trace and makes prompts that share prefixes as in the trace.

A trace has ids of the blocks of 512 tokens that make up a prompt; equal ids mean equal blocks
after equal beginnings. Here an id seeds a random sequence, of which the first tokens stand for
the block, so two prompts share exactly the prefixes that they share in the trace, at any scale.
The next turn's blocks contain the answer of the trace, not the answer that the model gives
here: only prompts share.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from baton.core.page_keys import page_keys
from baton.planner.trace import BLOCK, TraceRequest, common_blocks

VOCABULARY = 30_000
"""Token ids are drawn below this; language models have more."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request to send."""

    seconds: float  # since the run began
    prompt: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Synthesis:
    """Turns a trace's requests into requests to send."""

    scale: Fraction
    speed: float
    seed: int

    @property
    def block_tokens(self) -> int:
        """Tokens that stand for a block of the trace."""
        return int(BLOCK * self.scale)

    def __post_init__(self) -> None:
        if self.scale <= 0 or BLOCK * self.scale % 1:
            raise ValueError(f"{BLOCK} tokens at a scale of {self.scale} are no whole number")

    def prompt_length(self, request: TraceRequest) -> int:
        return sum(self._block_lengths(request))

    def requests(self, chosen: Sequence[TraceRequest]) -> list[TimedRequest]:
        """Requests to send for `chosen`, of which the first starts at second 0."""
        return [
            TimedRequest(
                (request.seconds - chosen[0].seconds) / self.speed,
                self._prompt(request),
                max(1, round(request.answer_tokens * self.scale)),
            )
            for request in chosen
        ]

    def _prompt(self, request: TraceRequest) -> tuple[int, ...]:
        lengths = self._block_lengths(request)
        return tuple(
            token
            for block, length in zip(request.blocks, lengths, strict=True)
            for token in self._block(block, length)
        )

    def _block_lengths(self, request: TraceRequest) -> list[int]:
        whole, rest = divmod(request.prompt_tokens, BLOCK)
        # A partial block is rounded up, so that it stays part of the prompt.
        return [self.block_tokens] * whole + ([-(-rest * self.block_tokens // BLOCK)] * (rest > 0))

    def _block(self, block: int, length: int) -> list[int]:
        return _draw(random.Random(f"{self.seed} {block}"), length)


def with_loads(requests: Sequence[TimedRequest], loads: Sequence[float]) -> list[TimedRequest]:
    """Multiplies the arrival rate by each of `loads`, for equal parts of the time."""
    part = requests[-1].seconds / sum(loads)
    # When each part begins in the given times; in the new ones it is part * index.
    begins = [part * sum(loads[:index]) for index in range(len(loads))]
    found = []
    for request in requests:
        index = bisect.bisect_right(begins, request.seconds) - 1
        sent = part * index + (request.seconds - begins[index]) / loads[index]
        found.append(dataclasses.replace(request, seconds=sent))
    return found


class FreshPrompts:
    """Random prompts that share nothing. The same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, length: int) -> tuple[int, ...]:
        return tuple(_draw(self._random, length))


def _draw(source: random.Random, length: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(length)]


def sessions(trace: Sequence[TraceRequest]) -> list[list[TraceRequest]]:
    """Splits the trace into parts that share nothing but the blocks common to all of it (a system
    prompt).

    An id stands for a whole prefix, so two requests share more than the common blocks exactly if
    their next blocks are the same.
    """
    common = common_blocks(trace)
    parts: dict[tuple[int, ...], list[TraceRequest]] = {}
    alone: list[list[TraceRequest]] = []
    for request in trace:
        if key := request.blocks[common : common + 1]:
            parts.setdefault(key, []).append(request)
        else:
            alone.append([request])
    return [*parts.values(), *alone]


def slice_of_sessions(
    parts: Iterable[list[TraceRequest]], count: int, seed: int
) -> list[TraceRequest]:
    """`count` requests, or a few less: whole sessions, drawn at random, each at its own time.

    A cluster that gets a share of the traffic and keeps its users sees the same: the slice has
    the hit rate of the whole trace, and the time between two turns is kept.
    """
    drawn = list(parts)
    random.Random(seed).shuffle(drawn)
    chosen: list[TraceRequest] = []
    for part in drawn:
        if len(chosen) + len(part) <= count:
            chosen += part
    return sorted(chosen, key=lambda request: request.seconds)


def slice_of_time(trace: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """`count` successive requests, from a random one on.

    The arrivals are as dense as in the trace, but most earlier turns are missing.
    """
    start = random.Random(seed).randrange(max(1, len(trace) - count + 1))
    return list(trace[start : start + count])


def infinite_cache_hits(prompts: Iterable[Sequence[int]], page_size: int) -> int:
    """Prompt tokens that one infinite cache would hold when each prompt arrives.

    It keeps whole pages, stores each prompt's pages at once, and always computes a prompt's last
    token, from which the answer starts.
    """
    held: set[bytes] = set()
    hits = 0
    for prompt in prompts:
        keys = page_keys(b"", prompt, page_size)
        usable = keys[: (len(prompt) - 1) // page_size]
        hits += page_size * next(
            (at for at, key in enumerate(usable) if key not in held), len(usable)
        )
        held.update(keys)
    return hits

"""Cuts a slice of a trace and makes tokens that share prefixes as it says.

A trace names the blocks of 512 tokens that a prompt is made of; equal ids mean equal blocks
after equal beginnings. Here each id becomes the first tokens of a random sequence that the
id alone decides, so two prompts have exactly the beginnings in common that the trace says,
at any scale. What a request of the trace answered is part of the next turn's blocks, and
not what the model answers here: only prompts share.
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
"""Token ids are drawn below this. Models of language have more."""


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
        """`chosen`, with the first of them at second 0."""
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
        # A rest is never scaled to nothing: its block is part of the prompt.
        return [self.block_tokens] * whole + ([-(-rest * self.block_tokens // BLOCK)] * (rest > 0))

    def _block(self, block: int, length: int) -> list[int]:
        return _draw(random.Random(f"{self.seed} {block}"), length)


def with_loads(requests: Sequence[TimedRequest], loads: Sequence[float]) -> list[TimedRequest]:
    """The same requests, with the density multiplied for equal parts of the time."""
    part = requests[-1].seconds / sum(loads)
    # When each part begins: as they come, and as they are to be sent.
    comes = [part * sum(loads[:index]) for index in range(len(loads))]
    found = []
    for request in requests:
        index = bisect.bisect_right(comes, request.seconds) - 1
        sent = part * index + (request.seconds - comes[index]) / loads[index]
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
    """The trace in parts that share nothing but what all of it shares (a system prompt).

    An id stands for a whole beginning, so two requests share more than the common blocks
    exactly when the next block of both is the same.
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

    This is what a cluster sees that gets a share of the traffic and keeps its users: the
    hit rate of the slice is that of the whole trace, and the time between two turns stays.
    """
    drawn = list(parts)
    random.Random(seed).shuffle(drawn)
    chosen: list[TraceRequest] = []
    for part in drawn:
        if len(chosen) + len(part) <= count:
            chosen += part
    return sorted(chosen, key=lambda request: request.seconds)


def slice_of_time(trace: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """`count` requests in a row, from a random one on.

    The arrivals are as dense as in the trace, but most turns lose the turns before them.
    """
    start = random.Random(seed).randrange(max(1, len(trace) - count + 1))
    return list(trace[start : start + count])


def infinite_cache_hits(prompts: Iterable[Sequence[int]], page_size: int) -> int:
    """Prompt tokens that one endless cache would hold when each prompt comes.

    It keeps whole pages, has each prompt's at once, and of each prompt computes at least the
    last token, since the answer starts from there.
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

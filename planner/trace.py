"""What a trace asks for, and traffic made of it: as long, as dense and as uneven as wanted.

A trace is a file with a JSON object a line, as the Mooncake traces are: timestamp (ms),
input_length, output_length, and hash_ids of blocks of 512 tokens. Equal ids mean equal blocks
after equal beginnings.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

BLOCK = 512
"""Tokens in a block of the trace."""

MANY = 2**40
"""Times that no trace is played."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as the trace has it."""

    seconds: float  # since the trace began
    input_length: int
    output_length: int
    blocks: tuple[int, ...]


class Arrival(NamedTuple):
    """A request to simulate."""

    seconds: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a trace is played."""

    # So many of them at once, each with its own prompts, from moments that are spread evenly.
    copies: int = 1
    # For so long; None: once.
    seconds: float | None = None
    # Times as dense, for equal parts of that time one after the other.
    loads: tuple[float, ...] = (1.0,)


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a JSONL file, in the order of their time."""
    with path.open(encoding="utf-8") as lines:
        requests = [_parse(line) for line in lines if line.strip()]
    return sorted(requests, key=lambda request: request.seconds)


def _parse(line: str) -> TraceRequest:
    fields = json.loads(line)
    blocks = tuple(fields["hash_ids"])
    length = int(fields["input_length"])
    if len(blocks) != -(-length // BLOCK):
        raise ValueError(f"{length} tokens are not {len(blocks)} blocks of {BLOCK}")
    return TraceRequest(fields["timestamp"] / 1e3, length, int(fields["output_length"]), blocks)


def common_blocks(trace: Sequence[TraceRequest]) -> int:
    """How many blocks all requests begin with. The first and last in order differ soonest."""
    first = min(request.blocks for request in trace)
    last = max(request.blocks for request in trace)
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))


def arrivals(trace: Sequence[TraceRequest], traffic: Traffic) -> Iterator[Arrival]:
    """In the order of their time."""
    length = _length(trace)
    seconds = traffic.seconds or length
    part = seconds / len(traffic.loads)
    distinct = _Distinct.of(trace)
    streams = [
        _endless(trace, distinct, length * copy / traffic.copies, range(copy, MANY, traffic.copies))
        for copy in range(traffic.copies)
    ]
    played, began = 0.0, 0.0  # of the trace's time, and of ours, at the start of a part
    load, *loads = traffic.loads
    for arrival in heapq.merge(*streams, key=attrgetter("seconds")):
        while arrival.seconds >= played + part * load:
            if not loads:
                return
            played, began = played + part * load, began + part
            load, *loads = loads
        yield arrival._replace(seconds=began + (arrival.seconds - played) / load)


def _length(trace: Sequence[TraceRequest]) -> float:
    """Of the trace, with the gap between its last request and the first, played again."""
    if len(trace) < 2:
        return 1.0
    span = trace[-1].seconds - trace[0].seconds
    return max(span * len(trace) / (len(trace) - 1), 1e-3)


@dataclass(frozen=True, slots=True)
class _Distinct:
    """How to give a trace other prompts: what all share stays the same, all else is shifted."""

    common: int
    stride: int

    @classmethod
    def of(cls, trace: Sequence[TraceRequest]) -> _Distinct:
        largest = max((block for request in trace for block in request.blocks), default=0)
        return cls(common_blocks(trace), largest + 1)

    def blocks(self, request: TraceRequest, number: int) -> tuple[int, ...]:
        shift, common = self.stride * number, self.common
        own = [block + shift for block in request.blocks[common:]]
        return (*request.blocks[:common], *own)


def _endless(
    trace: Sequence[TraceRequest], distinct: _Distinct, offset: float, numbers: Iterable[int]
) -> Iterator[Arrival]:
    """The trace from `offset` on, and again and again, each time with prompts of its own."""
    length, began = _length(trace), trace[0].seconds
    for turn, number in enumerate(numbers):
        for request in trace:
            at = turn * length - offset + request.seconds - began
            if at >= 0:
                blocks = distinct.blocks(request, number)
                answer = max(1, request.output_length)
                yield Arrival(at, request.input_length, answer, blocks)

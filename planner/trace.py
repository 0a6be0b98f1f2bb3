"""Reads a trace, and makes traffic of any length and density from it.

A trace is a file with one JSON object a line, like the Mooncake traces: timestamp (ms),
input_length, output_length, and hash_ids of blocks of 512 tokens. Equal ids mean equal blocks
after equal prefixes. In traces of several models, `model` names a request's.
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

_UNLIMITED = 2**40
"""More repetitions of a trace than are ever needed."""

LARGEST = 2**53
"""Above it a float has gaps between integers, and the trace's time would stand still."""


class TraceRequest(NamedTuple):
    seconds: float  # since the trace began
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a trace is played."""

    # Simultaneous copies of the trace, at evenly spread offsets. Each has its own prompts.
    copies: int = 1
    # None plays the trace once.
    seconds: float | None = None
    # Factors on the density, each for an equal part of that time.
    loads: tuple[float, ...] = (1.0,)


def read_trace(path: Path) -> list[TraceRequest]:
    """Returns the requests of a JSONL file, ordered by time."""
    with path.open(encoding="utf-8") as lines:
        requests = [_parse_line(at, line) for at, line in enumerate(lines, 1) if line.strip()]
    return sorted(requests, key=lambda request: request.seconds)


def _parse_line(number: int, line: str) -> TraceRequest:
    """Errors name the line."""
    try:
        return _parse(json.loads(line))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {number} is not valid JSON: {error.msg} at column {error.colno}"
        ) from None
    except KeyError as error:
        raise ValueError(f"line {number} has no {error}") from None
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _parse(fields: object) -> TraceRequest:
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    blocks, length = fields["hash_ids"], _whole(fields, "input_length")
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise ValueError("hash_ids must be a list of integers")
    if len(blocks) != -(-length // BLOCK):
        raise ValueError(f"{length} tokens are not {len(blocks)} blocks of {BLOCK}")
    answer, model = _whole(fields, "output_length"), str(fields.get("model") or "")
    seconds = _number(fields, "timestamp") / 1e3
    return TraceRequest(seconds, length, answer, tuple(blocks), model)


def _number(fields: dict[str, object], name: str) -> float:
    value = fields[name]
    if not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError(f"{name} must be a number from 0 to 2^53, not {value!r}")
    return value


def _whole(fields: dict[str, object], name: str) -> int:
    value = _number(fields, name)
    if value != int(value):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    return int(value)


def common_blocks(trace: Sequence[TraceRequest]) -> int:
    """Counts the leading blocks that all requests share."""
    # In sorted order, the first and the last share the least.
    first = min(request.blocks for request in trace)
    last = max(request.blocks for request in trace)
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))


def arrivals(trace: Sequence[TraceRequest], traffic: Traffic) -> Iterator[TraceRequest]:
    """Yields the traffic's requests, ordered by time."""
    length = _length(trace)
    seconds = traffic.seconds or length
    part = seconds / len(traffic.loads)
    streams = [
        _endless(trace, length * copy / traffic.copies, range(copy, _UNLIMITED, traffic.copies))
        for copy in range(traffic.copies)
    ]
    played, began = 0.0, 0.0  # trace time, and our time, at the start of a part
    load, *loads = traffic.loads
    for arrival in heapq.merge(*streams, key=attrgetter("seconds")):
        while arrival.seconds >= played + part * load:
            if not loads:
                return
            played, began = played + part * load, began + part
            load, *loads = loads
        yield arrival._replace(seconds=began + (arrival.seconds - played) / load)


def _length(trace: Sequence[TraceRequest]) -> float:
    """Returns the trace's seconds, with a mean gap before it repeats."""
    if len(trace) < 2:
        return 1.0
    span = trace[-1].seconds - trace[0].seconds
    return max(span * len(trace) / (len(trace) - 1), 1e-3)


def _endless(
    trace: Sequence[TraceRequest], offset: float, numbers: Iterable[int]
) -> Iterator[TraceRequest]:
    """Repeats the trace from `offset` on without end. Each repetition has its own prompts: the
    common blocks stay, the others get new ids."""
    length, began = _length(trace), trace[0].seconds
    common = {model: common_blocks(own) for model, own in by_model(trace).items()}
    stride = 1 + max((block for request in trace for block in request.blocks), default=0)
    for turn, number in enumerate(numbers):
        for request in trace:
            at = turn * length - offset + request.seconds - began
            if at >= 0:
                shared = common[request.model]
                own = [block + stride * number for block in request.blocks[shared:]]
                blocks = (*request.blocks[:shared], *own)
                answer = max(1, request.answer_tokens)
                yield request._replace(seconds=at, answer_tokens=answer, blocks=blocks)


def by_model(trace: Iterable[TraceRequest]) -> dict[str, list[TraceRequest]]:
    found: dict[str, list[TraceRequest]] = {}
    for request in trace:
        found.setdefault(request.model, []).append(request)
    return found

"""Callers that send requests at a given rate (an open loop) and record each result."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from baton import AsyncClient
from baton.core.errors import BatonError
from baton.core.process import cancel_all

PROMPT_SECONDS = 0.05
"""A refusal must come within this time."""

TICK_SECONDS = 0.002

VOCABULARY = range(1000, 20_000)  # ids of ordinary tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of every request."""

    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Kind:
    """A share of the requests. The deadline is in multiples of the seconds that an answer takes
    when the cluster is otherwise idle."""

    share: float
    tenant: str
    priority: int
    deadline: float = math.inf


KINDS = (
    Kind(0.35, "shop", 0, 4.0),
    Kind(0.15, "shop", 0, 8.0),
    Kind(0.20, "search", 0, 6.0),
    Kind(0.10, "search", 0),
    Kind(0.20, "reports", 10, 12.0),
)


@dataclass(slots=True)
class Result:
    """The result of a request. Times are seconds after the request was due."""

    due: float
    deadline: float
    lag: float = 0.0  # the caller's own delay in sending the request
    late: float = 0.0  # the largest lag of the callers' event loop meanwhile
    ended: float = 0.0
    first_token: float = math.inf
    error: BatonError | None = None

    @property
    def in_time(self) -> bool:
        return self.error is None and self.ended <= self.deadline

    @property
    def refused(self) -> bool:
        """True if it failed before its first token and its deadline."""
        begun = self.first_token < math.inf
        return self.error is not None and not begun and self.ended < self.deadline


class Callers:
    """One client per tenant. `alone` is the seconds of an answer in an idle cluster."""

    def __init__(self, address: str, keys: Mapping[str, str], shape: Shape, seed: int) -> None:
        self._clients = {name: AsyncClient(address, api_key=key) for name, key in keys.items()}
        self._shape = shape
        self._draw = random.Random(seed)
        self.alone = 0.0
        self._lags: list[tuple[float, float]] = []  # when, and by how much

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def measure_alone(self, repeats: int = 5) -> None:
        """Measures `alone` as a median, after one call to warm up."""
        kind = Kind(1.0, "shop", 0)
        results = [await self._call(kind, time.monotonic()) for _ in range(repeats + 1)]
        self.alone = sorted(result.ended for result in results[1:])[repeats // 2]

    async def capacity(self, seconds: float, callers: int) -> float:
        """Answers per second when each of `callers` waits for its answer before its next request;
        counted in the second half."""
        began = time.monotonic()
        ends: list[float] = []

        async def keep_calling() -> None:
            while (now := time.monotonic()) < began + seconds:
                result = await self._call(Kind(1.0, "shop", 0), now)
                if result.error is None:
                    ends.append(result.due + result.ended)

        await asyncio.gather(*(keep_calling() for _ in range(callers)))
        counted = [end for end in ends if began + seconds / 2 <= end < began + seconds]
        return len(counted) / (seconds / 2)

    async def offer(self, rate: float, seconds: float) -> list[Result]:
        """Sends `rate` requests per second at random times. Returns when all have ended."""
        due = time.monotonic()
        end = due + seconds
        calls = []
        watching = asyncio.create_task(self._watch())
        weights = [kind.share for kind in KINDS]
        while (due := due + self._draw.expovariate(rate)) < end:
            await asyncio.sleep(due - time.monotonic())
            (kind,) = self._draw.choices(KINDS, weights)
            calls.append(asyncio.create_task(self._call(kind, due)))
        results = await asyncio.gather(*calls)
        await cancel_all(watching)
        return results

    async def _watch(self) -> None:
        """Records the lag of the callers' event loop."""
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self._lags.append((now, now - due))

    def _lag_since(self, begin: float) -> float:
        lags = itertools.takewhile(lambda noted: noted[0] >= begin, reversed(self._lags))
        return max((lag for _, lag in lags), default=0.0)

    async def _call(self, kind: Kind, due: float) -> Result:
        deadline = kind.deadline * self.alone if kind.deadline < math.inf else math.inf
        result = Result(due, deadline)
        result.lag = time.monotonic() - due
        prompt = self._draw.choices(VOCABULARY, k=self._shape.prompt_tokens)
        stream = self._clients[kind.tenant].stream(
            prompt,
            max_tokens=self._shape.answer_tokens,
            ignore_eos=True,
            priority=kind.priority,
            timeout=deadline if deadline < math.inf else None,
        )
        try:
            async with stream:
                async for _ in stream:
                    result.first_token = min(result.first_token, time.monotonic() - due)
        except BatonError as error:
            result.error = error
        result.ended = time.monotonic() - due
        # Lets _watch record a lag that is due now.
        await asyncio.sleep(TICK_SECONDS)
        result.late = self._lag_since(due)
        return result


async def call_http(address: str, key: str, shape: Shape) -> tuple[int, float, bool]:
    """Makes one call. Returns its status, its seconds and whether it had a Retry-After."""
    prompt = random.choices(VOCABULARY, k=shape.prompt_tokens)
    body = {"prompt": prompt, "max_tokens": shape.answer_tokens}
    content = json.dumps(body)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write((head + content).encode())
        answered = await reader.readuntil(b"\r\n\r\n")
        seconds = time.monotonic() - began
        await reader.read()
    finally:
        writer.close()
    return int(answered.split()[1]), seconds, b"\r\nretry-after:" in answered.lower()

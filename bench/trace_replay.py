"""Sends requests at their times (an open loop) and records each outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton import Answer, AsyncClient
from baton.core.errors import BatonError
from bench.trace_workload import FreshPrompts, TimedRequest

TIMEOUT_SECONDS = 600.0
"""Timeout of one answer; longer ones count as errors."""

WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request. Times are seconds since it was due."""

    prompt_tokens: int
    token_seconds: tuple[float, ...] = ()  # one per token of the answer
    cached_tokens: int = 0  # prompt tokens that were not computed
    local: bool = False  # whether the decode worker prefilled the prompt
    reason_code: str = ""  # the placement's reason
    error: str = ""  # empty for an answer

    @property
    def ttft(self) -> float:
        return self.token_seconds[0]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next. Tokens that arrive together share the time."""
        return [
            later - sooner
            for sooner, later in zip(self.token_seconds, self.token_seconds[1:], strict=False)
        ]


async def replay(client: AsyncClient, requests: Sequence[TimedRequest]) -> list[Outcome]:
    """Sends all requests. Returns their outcomes, in order."""
    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_ask(client, request, began + request.seconds))
            for request in requests
        ]
    return [task.result() for task in tasks]


async def answer_at_once(
    client: AsyncClient, prompts: Sequence[tuple[int, ...]], answer_tokens: int
) -> list[Outcome]:
    """Sends prompts together. Returns their outcomes when all have ended."""
    outcomes = await replay(
        client, [TimedRequest(0.0, prompt, answer_tokens) for prompt in prompts]
    )
    if failed := next((outcome for outcome in outcomes if outcome.error), None):
        raise SystemExit(f"the cluster does not answer: {failed.error}")
    return outcomes


async def warm_up(client: AsyncClient, prompts: FreshPrompts) -> None:
    """Runs some steps on every worker, so that the router has measured their costs."""
    for _ in range(2):
        await answer_at_once(client, [prompts.draw(WARM_UP_TOKENS) for _ in range(4)], 4)


async def _ask(client: AsyncClient, request: TimedRequest, due: float) -> Outcome:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(due - clock())
    seconds: list[float] = []
    try:
        async with client.stream(
            request.prompt,
            max_tokens=request.answer_tokens,
            ignore_eos=True,
            timeout=TIMEOUT_SECONDS,
        ) as stream:
            async for delta in stream:
                seconds += _spread(seconds, clock() - due, len(delta.token_ids))
            return _outcome(request, seconds, stream.answer)
    except BatonError as error:
        return Outcome(len(request.prompt), error=f"{type(error).__name__}: {error.message}")


def _spread(before: Sequence[float], now: float, count: int) -> list[float]:
    """Times of `count` tokens that arrived together, spread over the gap before."""
    last = before[-1] if before else now
    return [last + (now - last) * (place + 1) / count for place in range(count)]


def _outcome(request: TimedRequest, seconds: Sequence[float], answer: Answer) -> Outcome:
    placement = answer.placements[-1]
    return Outcome(
        len(request.prompt),
        tuple(seconds),
        cached_tokens=answer.usage.cached_tokens,
        local=placement.policy == "local",
        reason_code=placement.reason_code,
    )

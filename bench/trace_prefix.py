"""The gain of a hit on a long shared prefix: TTFT cold against warm, on the same cluster."""

from __future__ import annotations

import statistics

from baton import AsyncClient
from bench.trace_replay import answer_at_once, warm_up
from bench.trace_workload import FreshPrompts

SHARED_TOKENS = 1500
OWN_TOKENS = 16
ANSWER_TOKENS = 4


async def print_prefix_hit(address: str, repeats: int, seed: int) -> None:
    """Prints medians over `repeats` prefixes, each sent twice with different ends."""
    prompts = FreshPrompts(seed)
    async with AsyncClient(address) as client:
        await warm_up(client, prompts)
        pairs = [await _cold_and_warm(client, prompts) for _ in range(repeats)]
    cold, warm = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"TTFT of {SHARED_TOKENS} shared and {OWN_TOKENS} own tokens, median of {repeats}")
    print(f"{'cold':<8}{cold * 1e3:>10,.0f} ms")
    print(f"{'warm':<8}{warm * 1e3:>10,.0f} ms")
    print(f"{'ratio':<8}{cold / warm:>10.1f}")


async def _cold_and_warm(client: AsyncClient, prompts: FreshPrompts) -> tuple[float, float]:
    shared = prompts.draw(SHARED_TOKENS)
    return await _ttft(client, shared, prompts), await _ttft(client, shared, prompts)


async def _ttft(client: AsyncClient, shared: tuple[int, ...], prompts: FreshPrompts) -> float:
    prompt = shared + prompts.draw(OWN_TOKENS)
    (outcome,) = await answer_at_once(client, [prompt], ANSWER_TOKENS)
    return outcome.ttft

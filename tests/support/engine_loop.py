"""The smallest loop that serves prompts with an engine, in mixed batches."""

from __future__ import annotations

import random
from pathlib import Path

from baton.core.types import Adapter, AttemptKey, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence

KV_MEMORY = 4 << 20


def load(folder: Path, page_size: int = 16, **options: str) -> Engine:
    return Engine.load(folder, page_size=page_size, kv_memory=KV_MEMORY, **options)


def sequence(engine: Engine, prompt: list[int], count: int) -> Sequence:
    """A greedy request with pages for prompt and answer."""
    started = _start(engine, prompt, count)
    started.lease.cover(engine.pool.pages_for(len(prompt) + count))
    return started


def _start(
    engine: Engine, prompt: list[int], count: int, adapter: Adapter | None = None
) -> Sequence:
    """As `sequence`; tables with a window get their pages step by step."""
    work = Work(AttemptKey("test", 0), prompt, Sampling(), count, frozenset(), adapter=adapter)
    return Sequence(work, engine.pool.acquire(engine.pool.pages_for(len(prompt) + count)))


def serve(
    engine: Engine,
    prompts: list[list[int]],
    count: int,
    chunk: int,
    join_every: int = 2,
    adapters: list[Adapter | None] | None = None,
) -> list[list[int]]:
    """The answers. A prompt joins every few steps; all active ones run together, in any order."""
    of_prompts = adapters or [None] * len(prompts)
    shuffle = random.Random(chunk).shuffle
    sequences: list[Sequence] = []
    step = 0
    while len(sequences) < len(prompts) or any(each.generated < count for each in sequences):
        if step % join_every == 0 and len(sequences) < len(prompts):
            at = len(sequences)
            sequences.append(_start(engine, prompts[at], count, of_prompts[at]))
        live = [each for each in sequences if each.generated < count]
        shuffle(live)
        plan = {each: min(chunk, each.uncomputed) for each in live}
        for each, tokens in plan.items():
            each.lease.cover(engine.pool.pages_for(each.computed + tokens))
        for each, token in zip(plan, engine.step(plan), strict=True):
            each.lease.advance(each.computed)
            if token is not None:
                each.append(token)
        step += 1
    for each in sequences:
        each.lease.release()
    return [each.tokens[each.prompt_length :] for each in sequences]


def answer(
    engine: Engine, prompt: list[int], count: int, adapter: Adapter | None = None
) -> list[int]:
    """One prompt on its own, run whole."""
    return serve(engine, [prompt], count, chunk=len(prompt), adapters=[adapter])[0]

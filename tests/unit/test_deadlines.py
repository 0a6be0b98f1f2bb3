"""A call's deadline, and what is known of a request before it is placed."""

from __future__ import annotations

import pytest
from front_door import front_door

from baton import AsyncClient, DeadlineExceeded
from baton.core.types import Role

PROMPT = [5] * 64


async def test_what_cannot_meet_its_deadline_is_refused_at_once() -> None:
    async with front_door() as door, AsyncClient(door.address) as client:
        # Nothing was measured yet, so nothing is known.
        await client.generate(PROMPT, max_tokens=2, timeout=10.0)
        for _ in range(200):
            door.models.named("").serving.placer.costs.note_prompt(Role.PREFILL, 64, 0, 0, 30.0)
            door.models.named("").serving.placer.costs.note_prompt(Role.DECODE, 64, 0, 0, 30.0)
        with pytest.raises(DeadlineExceeded, match=r"predicted in (29|30)\..* leaves (9|10)\."):
            await client.generate(PROMPT, max_tokens=2, timeout=10.0)
        # Whoever waits long enough, or for ever, is served.
        await client.generate(PROMPT, max_tokens=2, timeout=100.0)
        await client.generate(PROMPT, max_tokens=2)


async def test_an_answer_ends_with_its_deadline() -> None:
    async with (
        front_door(step_seconds=0.05) as door,
        AsyncClient(door.address) as client,
    ):
        with pytest.raises(DeadlineExceeded):
            await client.generate(PROMPT, max_tokens=1000, timeout=0.5)
        for _ in range(100):
            if not door.models.named("").serving.active:
                break
            await client.status()
        assert not door.models.named("").serving.active

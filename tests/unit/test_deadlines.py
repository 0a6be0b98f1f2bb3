"""A call's deadline, and what is known of a request before it is placed."""

from __future__ import annotations

import pytest
from front_door import front_door

from baton import AsyncClient, DeadlineExceeded
from baton.core.errors import QuarantineFull
from baton.core.types import AttemptKey, Role
from baton.core.wire import failed_to
from baton.v1 import worker_pb2 as pb
from bench.instant_worker import InstantWorker

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


def refuse_reservations(patch: pytest.MonkeyPatch) -> None:
    """As a decode worker does whose quarantine is full."""
    replies = InstantWorker._replies

    def refusing(self: InstantWorker, message: pb.RouterMessage) -> list[pb.WorkerMessage]:
        if not message.HasField("reserve"):
            return replies(self, message)
        work = message.reserve.work
        key = AttemptKey(work.request_id, work.epoch)
        return [failed_to(key, QuarantineFull("7 of 12 pages are in quarantine"))]

    patch.setattr(InstantWorker, "_replies", refusing)


async def test_a_request_that_is_refused_again_and_again_ends_with_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_reservations(monkeypatch)
    async with (
        front_door(local_prefill="never") as door,
        AsyncClient(door.address) as client,
    ):
        with pytest.raises(DeadlineExceeded):
            await client.generate(PROMPT, max_tokens=1000, timeout=0.5)

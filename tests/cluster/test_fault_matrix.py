"""Signals at every process, at every moment of a request: real processes, NIXL, a real model.

In each cell five requests run: two greedy, two sampled with penalties, and one
of the latter that wants two answers. Their tokens and text equal the undisturbed
run's, or the documented error arrives in time; afterwards every pool and queue is
empty and the next request is served.

`make test-faults` runs it and prints the table of docs/RELIABILITY.md. With every `make test`
run test_chaos.py, test_migration.py and test_drain_and_health.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from fault_table import ROWS, Row
from processes import ProcessCluster
from waiting import until

import baton
from baton import Answer, AsyncClient
from baton.core import metrics
from baton.core.model_store import EMBEDDED

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
TARGETS = ("prefill-0", "decode-0", "router")
MOMENTS = ("queued", "computing", "transferring", "token 1", "token 6", "last token")
CELLS = [
    pytest.param(*cell, id="-".join(cell)) for cell in itertools.product(SIGNALS, TARGETS, MOMENTS)
]
pytestmark = pytest.mark.faults

CHUNK = 64
ANSWER = 16
# Much longer than a row takes on two cores: others may use them too.
DEADLINE_SECONDS = 120.0
# Longer than it takes to call a worker frozen.
ROUTER_FREEZE_SECONDS = 4.0

# Characters of several tokens, so that a seam within one would show.
TEXT = "🦊🌍 狐狸 こんにちは " * 6
LONG_TEXT = "🦊🌍 狐狸 こんにちは " * 11
GREEDY: dict[str, float] = {"temperature": 0.0}
SAMPLED: dict[str, float] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 11,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
}
TEXTS = {"short": TEXT, "long": LONG_TEXT}
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "n=2": {**SAMPLED, "n": 2}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    sections = {
        "prefill": {"kv_memory": "128MiB", "threads": 1, "chunk_tokens": CHUNK},
        "decode": {"kv_memory": "128MiB", "threads": 1},
        "router": {"placement_timeout": DEADLINE_SECONDS},
    }
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with ProcessCluster(
        EMBEDDED,
        tmp_path_factory.mktemp("faults"),
        prefill=2,
        decode=2,
        tree={**sections, "drain_seconds": DEADLINE_SECONDS},
        # Soon enough that requests must move.
        per_worker={name: {"drain_seconds": 0.5} for name in workers},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: ProcessCluster) -> dict[str, Answer]:
    """The undisturbed answers, by prompt and by how they are sampled."""
    return undisturbed(cluster, "short")


@pytest.fixture(scope="module")
def expected_of_long(cluster: ProcessCluster) -> dict[str, Answer]:
    return undisturbed(cluster, "long")


def undisturbed(cluster: ProcessCluster, length: str) -> dict[str, Answer]:
    with cluster.client() as client:
        return {
            f"{length} {kind}": client.generate(TEXTS[length], **options(sampling))
            for kind, sampling in KINDS.items()
        }


def options(sampling: dict[str, float], salt: str = "") -> dict[str, object]:
    """With a salt of its own a prompt is computed and sent, however often it was before."""
    common = {"max_tokens": ANSWER, "ignore_eos": True, "timeout": DEADLINE_SECONDS}
    return {**common, **sampling, "cache_salt": salt}


@dataclass
class Asked:
    """One request under way."""

    length: str
    kind: str
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: int = 0
    answer: Answer | None = None
    error: baton.BatonError | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def answers(self) -> int:
        return int(KINDS[self.kind].get("n", 1))

    @property
    def moved(self) -> int:
        """Answers that took more than one attempt."""
        choices = self.answer.choices if self.answer else ()
        return sum(len(choice.placements) > 1 for choice in choices)

    async def run(self, client: AsyncClient) -> None:
        stream = client.stream(TEXTS[self.length], **options(KINDS[self.kind], self.salt))
        try:
            async for delta in stream:
                self.tokens += len(delta.token_ids)
            self.answer = stream.answer
        except baton.BatonError as error:
            self.error = error

    def outcome(self, expected: dict[str, Answer]) -> str:
        if self.error is not None:
            return self.error.reason
        assert self.answer is not None
        same = said(self.answer) == said(expected[f"{self.length} {self.kind}"])
        return "same bytes" if same else f"WRONG: {self.answer}"


def said(answer: Answer) -> list[tuple[tuple[int, ...], str]]:
    return [(choice.token_ids, choice.text) for choice in answer.choices]


class Scene:
    """Requests on two pairs of workers, and the moment to strike."""

    def __init__(self, cluster: ProcessCluster, client: AsyncClient, moment: str) -> None:
        self._cluster = cluster
        self._client = client
        self._moment = moment
        length = "long" if moment == "transferring" else "short"
        # In this order each kind is once on each pair.
        kinds = ("greedy", "greedy", "sampled", "sampled", "n=2")
        self.asked = [Asked(length, kind) for kind in kinds]
        self._computed = self._tokens_computed()
        self._blockers: list[asyncio.Task[Answer]] = []

    async def begin(self) -> None:
        if self._moment == "queued":
            self._blockers = [
                asyncio.create_task(
                    self._client.generate([7] * 400, max_tokens=1, cache_salt=uuid.uuid4().hex)
                )
                for _ in range(2)
            ]
            await until(lambda: self._active(2))
        active = len(self._blockers)
        for request in self.asked:
            request.task = asyncio.create_task(request.run(self._client))
            active += request.answers
            await until(lambda active=active: self._active(active))

    async def wait_for_moment(self) -> None:
        match self._moment:
            case "transferring":
                await until(self._chunks_are_out)
            case "token 1":
                await until(lambda: self._has(1))
            case "token 6":
                await until(lambda: self._has(6))
            case "last token":
                await until(lambda: self._has(ANSWER - 1))

    async def end(self) -> None:
        tasks = [request.task for request in self.asked if request.task]
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asyncio.gather(*tasks)
            with contextlib.suppress(baton.BatonError):
                await asyncio.gather(*self._blockers)

    async def _active(self, count: int) -> bool:
        """Whether so many answers are on the workers, or have been."""
        ended = sum(each.answers for each in self.asked if each.task and each.task.done())
        ended += sum(each.done() for each in self._blockers)
        status = await self._client.status()
        return status.active_requests + ended >= count and not status.queued_requests

    async def _chunks_are_out(self) -> bool:
        return self._tokens_computed() - self._computed >= 2 * CHUNK

    async def _has(self, tokens: int) -> bool:
        return self.asked[0].tokens >= tokens

    def _tokens_computed(self) -> float:
        return self._cluster.metric("prefill-0", metrics.COMPUTED_TOKENS)


async def strike(cluster: ProcessCluster, number: str, target: str) -> None:
    process = cluster.router if target == "router" else cluster.workers[target]
    process.send(signal.Signals[number])
    if number == "SIGSTOP" and target == "router":
        await asyncio.sleep(ROUTER_FREEZE_SECONDS)
        process.send(signal.SIGCONT)


async def mend(cluster: ProcessCluster, number: str, target: str) -> None:
    """Has the process back, as Ray or an operator would."""
    if number == "SIGSTOP":
        if target != "router":
            cluster.workers[target].send(signal.SIGCONT)
    elif target == "router":
        await asyncio.to_thread(cluster.router.wait)
        await asyncio.to_thread(cluster.start_router)
    else:
        await asyncio.to_thread(cluster.restart, target)


async def is_whole(client: AsyncClient) -> bool:
    workers = (await client.status()).workers
    prefill = [each for each in workers if each.member.worker_id.startswith("prefill")]
    return all(each.attached for each in workers) and all(len(p.connected) == 2 for p in prefill)


@pytest.mark.parametrize(("number", "target", "moment"), CELLS)
async def test_the_answers_are_the_same_or_the_error_is_the_documented_one(
    cluster: ProcessCluster,
    expected: dict[str, Answer],
    request: pytest.FixtureRequest,
    number: str,
    target: str,
    moment: str,
) -> None:
    if moment == "transferring":
        expected |= request.getfixturevalue("expected_of_long")
    async with AsyncClient(cluster.address) as client:
        await until(lambda: is_whole(client), 60)
        scene = Scene(cluster, client, moment)
        await scene.begin()
        await scene.wait_for_moment()
        struck = time.monotonic()
        await strike(cluster, number, target)
        await scene.end()
        seconds = time.monotonic() - struck
    outcomes = tuple((request.kind, request.outcome(expected)) for request in scene.asked)
    moved = sum(request.moved for request in scene.asked)
    ROWS.append(Row(number, target, moment, outcomes, moved, seconds))
    await mend(cluster, number, target)
    allowed = {"same bytes"}
    if (number, target) == ("SIGKILL", "router"):
        allowed.add(baton.Unavailable.reason)
    assert {outcome for _, outcome in outcomes} <= allowed
    await after(cluster, expected)


async def after(cluster: ProcessCluster, expected: dict[str, Answer]) -> None:
    """Nothing is left behind, and the next request is served."""
    async with AsyncClient(cluster.address) as client:
        await until(lambda: is_whole(client), 60)
        await asyncio.to_thread(cluster.wait_idle)
        status = await client.status()
        assert (status.active_requests, status.queued_requests) == (0, 0)
        answer = await client.generate(TEXT, **options(SAMPLED))
        assert answer.token_ids == expected["short sampled"].token_ids
    await asyncio.to_thread(cluster.wait_idle)


async def test_thirty_cancels_a_second_for_a_minute_leave_nothing_behind(
    cluster: ProcessCluster, expected: dict[str, Answer]
) -> None:
    async def ask_and_cancel(client: AsyncClient, number: int) -> None:
        async with client.stream(TEXT, **options(SAMPLED, str(number))) as stream:
            with contextlib.suppress(TimeoutError, baton.Exhausted):
                async with asyncio.timeout(0.1 + number % 10 / 10):
                    await stream.read()

    async with AsyncClient(cluster.address) as client:
        tasks = []
        began = time.monotonic()
        for number in range(30 * 60):
            tasks.append(asyncio.create_task(ask_and_cancel(client, number)))
            await asyncio.sleep(max(0.0, began + number / 30 - time.monotonic()))
        await asyncio.gather(*tasks)
    await after(cluster, expected)

"""Streams while workers die again and again: from outside, or crashed by one of the requests.

Whoever merely was there gets the answer of an undisturbed run, and whoever crashes workers takes
down three at most. A short form runs with every `make test`, a long one with `make test-faults`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from crashing_worker import CRASHES, CULPRIT, PROMPT_TOKENS
from processes import ProcessCluster
from serving import Serve
from waiting import until

import baton
from baton import Answer, AsyncClient

SEED = 11
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
TREE: dict[str, object] = {
    "prefill": {"kv_memory": "8MiB", "threads": 1},
    "decode": {"kv_memory": "8MiB", "threads": 1},
    "router": {"placement_timeout": 60.0, "frozen_seconds": 1.5},
    "drain_seconds": 1.0,
}
OPTIONS: dict[str, object] = {"max_tokens": 200, "ignore_eos": True, "timeout": 300.0}
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 4, "presence_penalty": 0.5},
    {"temperature": 0.8, "seed": 5, "n": 2},
]
CRASHING = f"""
import os
from baton.worker.step_record import StepRecord

begin = StepRecord.begin

def crash(self, rows):
    begin(self, rows)
    for row in rows:
        if list(row.tokens[:4]) == {CULPRIT} and len(row.tokens) > {PROMPT_TOKENS + 20}:
            os.abort()

StepRecord.begin = crash
"""


class Streams:
    """Requests of several kinds, each compared with its undisturbed answer."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._expected: list[list[tuple[int, ...]]] = []
        self.outcomes: Counter[str] = Counter()
        self.moved = 0

    async def prepare(self) -> None:
        self._expected = [said(await self._ask(number)) for number in range(2 * len(KINDS))]

    async def run(self, count: int, together: int) -> None:
        """So many, of which some run at any time."""
        numbers = iter(range(count))

        async def one_after_another() -> None:
            for number in numbers:
                self.outcomes[await self._outcome(number)] += 1

        await asyncio.gather(*(one_after_another() for _ in range(together)))

    async def _ask(self, number: int, salt: str = "") -> Answer:
        kind = KINDS[number % len(KINDS)]
        prompt = [3 + number % (2 * len(KINDS))] * PROMPT_TOKENS
        return await self._client.generate(prompt, **{**OPTIONS, **kind, "cache_salt": salt})

    async def _outcome(self, number: int) -> str:
        try:
            answer = await self._ask(number, salt=str(number))
        except baton.BatonError as error:
            return f"{error.reason}: {error.message}"
        self.moved += sum(len(choice.placements) > 1 for choice in answer.choices)
        same = said(answer) == self._expected[number % len(self._expected)]
        return "same" if same else "different"


def said(answer: Answer) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in answer.choices]


class Supervisor:
    """Starts ended workers again, as Ray does, and counts that."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self._ending: set[str] = set()  # until they are ready again
        self.restarts = 0

    async def run(self, name: str) -> None:
        while True:
            if self._cluster.workers[name].has_ended:
                self.restarts += 1
                self._ending.add(name)
                await asyncio.to_thread(self._cluster.restart, name)
                self._ending.remove(name)
            await asyncio.sleep(0.1)

    async def strike(self, draw: Random) -> None:
        """A signal to a worker that serves. A stopped one continues a little later."""
        serving = [name for name in self._cluster.workers if name not in self._ending]
        if not serving:
            return
        name, number = draw.choice(serving), draw.choice(SIGNALS)
        worker = self._cluster.workers[name]
        worker.send(number)
        if number is not signal.SIGSTOP:
            self._ending.add(name)
        else:
            await asyncio.sleep(draw.uniform(0.5, 4.0))
            worker.send(signal.SIGCONT)

    async def strike_often(self, draw: Random, seconds: float, most: int) -> None:
        """Every `seconds` on average, until cancelled. `most` ends the strikes on a busy machine,
        where workers would be struck before they have started."""
        strikes = []
        try:
            for _ in range(most):
                await asyncio.sleep(draw.uniform(0.3, 1.7) * seconds)
                strikes.append(asyncio.create_task(self.strike(draw)))
        finally:
            await asyncio.gather(*strikes)

    async def is_whole(self) -> bool:
        ended = any(worker.has_ended for worker in self._cluster.workers.values())
        return not self._ending and not ended


@asynccontextmanager
async def supervised(cluster: ProcessCluster) -> AsyncIterator[Supervisor]:
    """Waits for all workers at the end."""
    supervisor = Supervisor(cluster)
    tasks = [asyncio.create_task(supervisor.run(name)) for name in cluster.workers]
    try:
        yield supervisor
        await until(supervisor.is_whole, 60)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {asyncio.CancelledError}, results


@pytest.mark.parametrize(
    ("count", "together", "seconds"),
    [
        pytest.param(12, 6, 0.5, id="short"),
        pytest.param(
            1000, 10, 5.0, id="long", marks=(pytest.mark.faults, pytest.mark.timeout(1800))
        ),
    ],
)
async def test_no_stream_is_lost_while_signals_hit_workers(
    tiny: Path, tmp_path: Path, count: int, together: int, seconds: float
) -> None:
    with ProcessCluster(tiny, tmp_path, prefill=2, decode=2, tree=TREE) as cluster:
        async with AsyncClient(cluster.address) as client, supervised(cluster) as supervisor:
            streams = Streams(client)
            await streams.prepare()
            strikes = supervisor.strike_often(Random(SEED), seconds, most=2 * count)
            faults = asyncio.create_task(strikes)
            await streams.run(count, together)
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
        print(streams.outcomes, f"moved: {streams.moved}, restarts: {supervisor.restarts}")
        assert streams.outcomes == {"same": count}
        cluster.wait_idle()


@pytest.mark.faults
@pytest.mark.parametrize("crash", CRASHES)
async def test_a_request_that_crashes_workers_takes_down_three_and_nobody_with_it(
    tiny: Path, tmp_path: Path, crash: str
) -> None:
    with ProcessCluster(
        tiny, tmp_path, prefill=2, decode=2, tree=TREE, module="crashing_worker"
    ) as cluster:
        async with AsyncClient(cluster.address) as client, supervised(cluster) as supervisor:
            streams = Streams(client)
            await streams.prepare()
            others = asyncio.create_task(streams.run(60, 8))
            prompt = [*CULPRIT, CRASHES[crash], *[3] * (PROMPT_TOKENS - len(CULPRIT) - 1)]
            with pytest.raises(baton.PoisonRequest):
                await client.generate(prompt, **OPTIONS)
            await others
        print(streams.outcomes, f"moved: {streams.moved}, restarts: {supervisor.restarts}")
        assert streams.outcomes == {"same": 60}
        assert supervisor.restarts == 3
        cluster.wait_idle()


@pytest.mark.fleet
def test_a_request_that_crashes_workers_takes_down_three_under_ray(
    tiny: Path, tmp_path: Path
) -> None:
    """Ray starts them again, and verdicts come through the controller."""
    # Every Python of the cluster imports it first.
    (tmp_path / "sitecustomize.py").write_text(CRASHING)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    flags = ("--model", str(tiny), "--prefill", "2", "--decode", "2", "--kv-memory", "4MiB")
    prompt = [*CULPRIT, *[3] * (PROMPT_TOKENS - len(CULPRIT))]
    with Serve(tmp_path, *flags, environment=environment) as serve:
        with serve.ready().client() as client, pytest.raises(baton.PoisonRequest):
            client.generate(prompt, max_tokens=100, ignore_eos=True, timeout=300.0)
        serve.wait_for(r"(prefill|decode)-\d +ready", 4 + 3)
        serve.wait_whole(4)
        assert len(re.findall(r"(prefill|decode)-\d +ready", serve.stdout)) == 4 + 3

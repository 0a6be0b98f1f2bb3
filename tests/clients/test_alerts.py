"""Every alert fires in a real Prometheus, by the fault that it is for.

The rules are those of deploy/prometheus with seconds for minutes; scrapes come once a second. Each
fault lasts until its alert fires, and the cluster is whole again before the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from monitoring import ALERTS, RULES
from processes import ProcessCluster, free_port
from prometheus_server import prometheus_server
from tiny_models import TINY_MODELS, save
from waiting import until

from baton import AsyncClient, BatonError

pytestmark = pytest.mark.timeout(300)

# Faults that come again and again are in every window, which is longer than what an alert waits.
WINDOW_SECONDS, FOR_SECONDS = 4, 1
DECODE = ("decode-0", "decode-1")
SECTION = {"threads": 1, "kv_memory": "400KiB"}


def in_seconds(rules: str) -> str:
    """The rules with some seconds for every minute."""
    windows = re.sub(r"\[(\d+)m\]", lambda found: f"[{int(found[1]) * WINDOW_SECONDS}s]", rules)
    return re.sub(r"for: (\d+)m", lambda found: f"for: {int(found[1]) * FOR_SECONDS}s", windows)


@pytest.fixture(scope="module")
def tiny_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    workspace = tmp_path_factory.mktemp("alerts")
    save(TINY_MODELS["llama"], workspace / "model")
    tree: dict[str, object] = {
        "prefill": {**SECTION, "chunk_tokens": 32},
        "decode": SECTION,
        "page_digests": "on",
        "cache": {
            "host_memory": "64KiB",
            "files": str(workspace / "files"),
            "files_budget": "64MiB",
        },
        "router": {
            # A router that is started again is where it was.
            **{key: free_port() for key in ("port", "http_port", "metrics_port")},
            "frozen_seconds": 300.0,  # what is frozen here must not count as lost
            "placement_timeout": 1.0,
            "first_token_timeout": 6.0,  # the deadline of what a worker has that stands still
            "max_queued": 150,
            "local_prefill": "never",
        },
    }
    with ProcessCluster(
        workspace / "model", workspace, decode=2, tree=tree, module="faulty_worker"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(
    programs: Path, tiny_cluster: ProcessCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "alerts.yaml"
    rules.write_text(in_seconds(ALERTS.read_text()))
    scraped = tiny_cluster.metrics, tiny_cluster.http
    with prometheus_server(programs, folder, *scraped, rules) as url:
        yield url


class Faults:
    """Makes faults; each ends with its block."""

    def __init__(self, cluster: ProcessCluster, client: AsyncClient, flags: Path) -> None:
        self._cluster, self._client, self._flags = cluster, client, flags
        self._asked = 0

    async def ask(self, prompt: int = 40, tokens: int = 4) -> None:
        """A prompt that no cache knows; an error is no concern of this client."""
        self._asked += 1
        ids = [1 + (self._asked * 7 + place * self._asked) % 90 for place in range(prompt)]
        with contextlib.suppress(BatonError):
            await self._client.generate(ids, max_tokens=tokens, ignore_eos=True)

    @asynccontextmanager
    async def repeating(self, act: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        async def repeat() -> None:
            while True:
                await act()
                await asyncio.sleep(0.05)

        async with _running(repeat()):
            yield

    @asynccontextmanager
    async def frozen(self, *names: str) -> AsyncIterator[None]:
        for name in names:
            self._cluster.workers[name].send(signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self._cluster.workers[name].send(signal.SIGCONT)

    @asynccontextmanager
    async def killed(self, *names: str) -> AsyncIterator[None]:
        for name in names:
            self._cluster.workers[name].kill()
        try:
            yield
        finally:
            for name in names:
                await asyncio.to_thread(self._cluster.restart, name)

    @asynccontextmanager
    async def flag(self, name: str) -> AsyncIterator[None]:
        """A fault of faulty_worker.py."""
        path = self._flags / name
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def stuttering(self, *names: str, seconds: float) -> AbstractAsyncContextManager[None]:
        """Workers that stand still again and again, with requests under way."""

        async def stutter() -> None:
            async with self.frozen(*names):
                asking = asyncio.gather(*(self.ask(tokens=12) for _ in range(3)))
                await asyncio.sleep(seconds)
            await asking

        return self.repeating(stutter)

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """Workers do not move and the queue is full; whoever else comes is refused."""
        many = asyncio.gather(*(self.ask() for _ in range(400)))
        async with self.frozen(*DECODE), _running(many), self.repeating(self.ask):
            yield

    @asynccontextmanager
    async def stalled(self) -> AsyncIterator[None]:
        """No first token comes."""
        async with self.frozen("prefill-0"), self.repeating(self.ask):
            yield

    @asynccontextmanager
    async def frozen_writer(self) -> AsyncIterator[None]:
        """It may write to more than a quarter of a pool when it stands still."""
        try:
            async with self.flag("stop"), _running(self.ask(prompt=240)):
                yield
        finally:
            self._cluster.workers["prefill-0"].send(signal.SIGCONT)

    @asynccontextmanager
    async def damage(self) -> AsyncIterator[None]:
        async with self.flag("damage"), self.repeating(self.ask):
            yield

    @asynccontextmanager
    async def leak(self) -> AsyncIterator[None]:
        """A lease that is not returned, and no request after it."""
        async with self.flag("leak"):
            while (self._flags / "leak").exists():
                await self.ask()
            yield
        for name in DECODE:  # the pages are lost until then
            async with self.killed(name):
                pass

    @asynccontextmanager
    async def full_disk(self) -> AsyncIterator[None]:
        """Writes beyond a few bytes fail."""
        pids = [self._cluster.workers[name].pid for name in DECODE]
        whole = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
        async with self.repeating(lambda: self.ask(prompt=120)):
            yield
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, whole)

    @asynccontextmanager
    async def lost_worker(self) -> AsyncIterator[None]:
        """It stands still until it has many requests, then it is killed; they go on elsewhere."""
        many = asyncio.gather(*(self.ask(prompt=8) for _ in range(60)))
        async with self.frozen("decode-1"), _running(many):
            await until(self._is_busy)
            async with self.killed("decode-1"):
                yield

    async def _is_busy(self) -> bool:
        """As the router counts."""
        workers = {each.member.worker_id: each for each in (await self._client.status()).workers}
        return workers["decode-1"].active_requests >= 10

    @asynccontextmanager
    async def failures(self) -> AsyncIterator[None]:
        async with self.killed(*DECODE), self.repeating(self.ask):
            yield

    @asynccontextmanager
    async def no_router(self) -> AsyncIterator[None]:
        self._cluster.router.kill()
        yield
        await asyncio.to_thread(self._cluster.start_router)


@asynccontextmanager
async def _running(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


FAULTS: dict[str, Callable[[Faults], AbstractAsyncContextManager[None]]] = {
    "BatonFirstTokenSlow": lambda faults: faults.stuttering("prefill-0", seconds=3.0),
    "BatonTokensSlow": lambda faults: faults.stuttering(*DECODE, seconds=0.6),
    "BatonQueueLong": Faults.full,
    "BatonRefuses": Faults.full,
    "BatonDeadlinesMissed": Faults.stalled,
    "BatonRequestsFail": Faults.failures,
    "BatonWorkerFaults": Faults.lost_worker,
    "BatonNoWorkers": lambda faults: faults.killed(*DECODE),
    "BatonRouterDown": Faults.no_router,
    "BatonQuarantine": Faults.frozen_writer,
    "BatonLeak": Faults.leak,
    "BatonPagesDamaged": Faults.damage,
    "BatonCacheFilesFail": Faults.full_disk,
}


async def states(url: str, alert: str) -> set[str] | None:
    """An alert's states, "pending" or "firing"; None while Prometheus does not answer."""
    try:
        async with httpx.AsyncClient() as http:
            answer = (await http.get(f"{url}/api/v1/alerts")).raise_for_status()
    except httpx.HTTPError:
        return None
    alerts = answer.json()["data"]["alerts"]
    return {each["state"] for each in alerts if each["labels"]["alertname"] == alert}


def test_every_alert_has_a_fault() -> None:
    assert list(FAULTS) == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("alert", FAULTS)
async def test_an_alert_fires_by_its_fault(
    alert: str, tiny_cluster: ProcessCluster, prometheus: str
) -> None:
    async def is_quiet() -> bool:
        return await states(prometheus, alert) == set()

    async def fires() -> bool:
        return "firing" in (await states(prometheus, alert) or ())

    await until(is_quiet, 120, pause=0.3)
    flags = tiny_cluster.folder / "faults"
    async with AsyncClient(tiny_cluster.address) as client:
        async with FAULTS[alert](Faults(tiny_cluster, client, flags)):
            await until(fires, 120, pause=0.3)
        await client.wait_ready(60.0)
    await asyncio.to_thread(tiny_cluster.wait_idle, 60.0)

"""Workers outlive whatever a router sends, and hold nothing for a router that is gone."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from processes import Process, ProcessCluster
from tiny_models import VOCABULARY

from baton import AsyncClient
from baton.core.types import PROTOCOL
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc

SIZES: dict[str, object] = {
    "prefill": {"kv_memory": "1MiB", "threads": 1},
    "decode": {"kv_memory": "1MiB", "threads": 1},
}


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tiny, tmp_path_factory.mktemp("cluster"), tree=SIZES) as running:
        yield running
        running.wait_idle()


class RawRouter:
    """A stream to one worker, without a router's good manners."""

    def __init__(self, call: grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]) -> None:
        self._call = call
        self.welcome = pb.Welcome()

    async def send(self, message: pb.RouterMessage) -> None:
        await self._call.write(message)

    async def receive(self, kind: str) -> pb.WorkerMessage:
        """The next message of a kind; others are passed over."""
        async with asyncio.timeout(10):
            while (message := await self._call.read()).WhichOneof("kind") != kind:
                pass
            return message


@asynccontextmanager
async def attach(worker: Process) -> AsyncIterator[RawRouter]:
    async with grpc.aio.insecure_channel(worker.wait_for(r"ready on (\S+)")) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Attach()
        router = RawRouter(call)
        await router.send(pb.RouterMessage(hello=pb.Hello(router_id="raw", protocol=PROTOCOL)))
        router.welcome = (await router.receive("welcome")).welcome
        yield router


def work(
    request_id: str, tokens: list[int], max_tokens: int = 4, temperature: float = 0.0
) -> pb.Work:
    return pb.Work(
        request_id=request_id,
        epoch=1,
        prompt_tokens=tokens,
        max_tokens=max_tokens,
        sampling=pb.Sampling(temperature=temperature, top_p=1.0, repetition_penalty=1.0),
    )


BAD_WORK = {
    "a token outside the vocabulary": (work("a", [VOCABULARY]), "TOKEN_OUT_OF_RANGE"),
    "an empty prompt": (work("a", []), "INVALID_REQUEST"),
    "no tokens wanted": (work("a", [1], max_tokens=0), "INVALID_REQUEST"),
    "a temperature that is no number": (work("a", [1], temperature=math.nan), "INVALID_SAMPLING"),
    "more than the pool holds": (work("a", [1] * 5000, max_tokens=5000), "PROMPT_TOO_LONG"),
    "more than the context holds": (work("a", [1] * 300), "PROMPT_TOO_LONG"),
}


@pytest.mark.parametrize("case", BAD_WORK)
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_bad_work_is_refused_and_the_worker_lives(
    cluster: ProcessCluster, name: str, case: str
) -> None:
    bad, reason = BAD_WORK[case]
    async with attach(cluster.workers[name]) as router:
        if name == "prefill-0":
            await router.send(pb.RouterMessage(prefill=pb.Prefill(work=bad)))
        else:
            await router.send(pb.RouterMessage(reserve=pb.Reserve(work=bad)))
        assert (await router.receive("failed")).failed.reason == reason
    async with AsyncClient(cluster.address) as client:
        assert (await client.generate([3], max_tokens=3)).usage.completion_tokens == 3


async def test_the_same_request_twice_is_one_request(cluster: ProcessCluster) -> None:
    prefill, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
    async with attach(prefill) as to_prefill, attach(decode) as to_decode:
        asked = work("twice", [1] * 40)
        for _ in range(2):
            receiver = to_decode.welcome.pool.agent
            await to_prefill.send(
                pb.RouterMessage(prefill=pb.Prefill(work=asked, receiver=receiver))
            )
            await to_decode.send(pb.RouterMessage(reserve=pb.Reserve(work=asked, sender="nobody")))
        await to_prefill.receive("first_token")
        await to_decode.receive("reserved")
        release = pb.Release(request_id="twice", epoch=1)
        await to_prefill.send(pb.RouterMessage(release=release))
        await to_decode.send(pb.RouterMessage(release=release))
        await asyncio.to_thread(cluster.wait_idle)


async def test_nonsense_is_dropped(cluster: ProcessCluster) -> None:
    for worker in cluster.workers.values():
        async with attach(worker) as router:
            await router.send(pb.RouterMessage())
            await router.send(pb.RouterMessage(sender_gone=pb.SenderGone(agent="nobody")))
            deliver = pb.Deliver(request_id="unknown", epoch=9, ticket=b"garbage")
            await router.send(pb.RouterMessage(deliver=deliver))
            await router.send(pb.RouterMessage(release=pb.Release(request_id="unknown")))
            assert (await router.receive("load")).load.fault == ""


async def test_both_phases_tell_alike_how_likely_a_prompt_was(cluster: ProcessCluster) -> None:
    asked = work("scored", list(range(40)), max_tokens=1)
    asked.prompt_logprobs = 2
    async with attach(cluster.workers["prefill-0"]) as router:
        await router.send(pb.RouterMessage(prefill=pb.Prefill(work=asked)))
        there = (await router.receive("first_token")).first_token.prompt_logprobs
    async with attach(cluster.workers["decode-0"]) as router:
        await router.send(pb.RouterMessage(compute=pb.Compute(work=asked)))
        here = (await router.receive("step")).step.tokens[0].prompt_logprobs
    assert len(here) == len(there) == 39
    for one, other in zip(here, there, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert list(one.top_token_ids) == list(other.top_token_ids)


async def test_another_protocol_is_refused_by_name(cluster: ProcessCluster) -> None:
    address = cluster.workers["decode-0"].wait_for(r"ready on (\S+)")
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Attach()
        await call.write(pb.RouterMessage(hello=pb.Hello(router_id="old", protocol=99)))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "protocol" in await call.details()


async def test_a_router_gone_between_ticket_and_delivery_leaves_nothing_behind(
    cluster: ProcessCluster,
) -> None:
    prefill, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
    async with attach(prefill) as to_prefill, attach(decode) as to_decode:
        asked = work("orphan", [1] * 40)
        receiver, sender = to_decode.welcome.pool.agent, to_prefill.welcome.pool.agent
        await to_prefill.send(pb.RouterMessage(prefill=pb.Prefill(work=asked, receiver=receiver)))
        await to_decode.send(pb.RouterMessage(reserve=pb.Reserve(work=asked, sender=sender)))
        await to_decode.receive("reserved")
        await to_prefill.receive("first_token")
    await asyncio.to_thread(cluster.wait_idle)


async def test_two_routers_on_pools_for_one_request_never_wait_for_each_other(
    tiny: Path, tmp_path: Path
) -> None:
    """Whoever has to give way is tried again, until every request is answered."""
    tree = {role: {"kv_memory": "160KiB", "threads": 1} for role in ("prefill", "decode")}
    draw = random.Random(3)
    gate = asyncio.Semaphore(24)

    async def ask(client: AsyncClient) -> None:
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(60, 110))]
        async with gate:
            await client.generate(prompt, max_tokens=draw.randint(2, 14), timeout=60)

    with ProcessCluster(tiny, tmp_path, tree=dict(tree)) as cluster:
        other = Process(
            tmp_path, "other", ["baton.router", "--config", str(tmp_path / "router.yaml")]
        )
        addresses = [cluster.address, other.wait_for(r"gRPC on (\S+),")]
        async with AsyncClient(addresses[0]) as one, AsyncClient(addresses[1]) as two:
            await two.wait_ready()
            await asyncio.gather(*(ask(client) for client in [one, two] * 30))
        other.kill()
        cluster.wait_idle()


async def test_two_workers_of_one_name_are_not_confused(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, prefill=1, tree=SIZES) as cluster:
        config = str(tmp_path / "prefill-0.yaml")
        twin = Process(
            tmp_path,
            "twin",
            ["baton.prefill_worker", "--config", config, "--name", "prefill-0", "--port", "0"],
        )
        cluster.workers["twin"] = twin
        cluster.router.kill()
        cluster.start_router()
        async with AsyncClient(cluster.address) as client:
            assert (await client.generate([3], max_tokens=3)).usage.completion_tokens == 3
            faults = [worker.fault for worker in (await client.status()).workers]
    assert sum("another worker has the name prefill-0 too" in fault for fault in faults) == 1

"""A worker's service, over a real stream to a router that reads late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.core.types import PROTOCOL
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.engine_thread import Attached, Detached, EngineInbox, FromRouter
from baton.worker.outbox import Outbox
from baton.worker.worker_service import WorkerService

Call = grpc.aio.StreamStreamCall[Any, Any]
HELLO = pb.RouterMessage(hello=pb.Hello(router_id="router", protocol=PROTOCOL))
RELEASE = pb.RouterMessage(release=pb.Release(request_id="r", epoch=1))
FAILED = pb.WorkerMessage(failed=pb.Failed(request_id="r", epoch=1, message="drained"))


@asynccontextmanager
async def attached(inbox: EngineInbox, outbox: Outbox) -> AsyncIterator[Call]:
    """A router's stream that has been welcomed."""
    server = grpc.aio.server()
    service = WorkerService(inbox, outbox, pb.Welcome, lambda restart: None, lambda role: None)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Call = worker_pb2_grpc.WorkerStub(channel).Attach()  # type: ignore[assignment]
        await call.write(HELLO)
        assert (await call.read()).HasField("welcome")
        yield call
    await server.stop(None)


async def test_a_router_that_still_writes_reads_all_that_was_sent_before_the_end() -> None:
    inbox, outbox = EngineInbox(), Outbox(asyncio.get_running_loop())
    async with attached(inbox, outbox) as call:
        assert isinstance(await asyncio.to_thread(inbox.get, timeout=10), Attached)
        for _ in range(3):
            outbox.broadcast_now(FAILED)
        outbox.close()
        await asyncio.sleep(0.2)  # a worker that ended its stream would have done so
        for _ in range(3):
            await call.write(RELEASE)
            assert isinstance(await asyncio.to_thread(inbox.get, timeout=10), FromRouter)
        assert [await call.read() for _ in range(3)] == [FAILED] * 3
        assert (await call.read()).HasField("closing")
        call.cancel()
        assert isinstance(await asyncio.to_thread(inbox.get, timeout=10), Detached)

"""What a router does while the controller is slow, or away."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
from processes import free_port
from waiting import until

from baton.core.errors import Unavailable
from baton.core.process import cancel_all
from baton.core.types import Adapter
from baton.router.requests.adapter_names import AdapterNames
from baton.router.requests.serving import Serving
from baton.router.served_models import ServedModel
from baton.router.workers import controller_client
from baton.router.workers.controller_client import ControllerClient, apply_members
from baton.router.workers.membership import Membership
from baton.v1 import cluster_pb2 as pb
from baton.v1 import cluster_pb2_grpc, worker_pb2

# More than a handshake takes on an idle machine, and less than anybody minds.
SECONDS = 0.4


class Answering(cluster_pb2_grpc.ControlServicer):
    async def Pools(self, message: pb.PoolsRequest, context: object) -> pb.PoolsResponse:
        return pb.PoolsResponse(prefill=1, decode=2)


class Naming(cluster_pb2_grpc.MembershipServicer):
    """Names one adapter, then ends the name."""

    async def Watch(self, message: pb.WatchRequest, context: object) -> AsyncIterator[pb.Members]:
        adapter = worker_pb2.Adapter(digest=b"digest", folder="/a")
        yield pb.Members(adapters=[pb.NamedAdapter(name="sql", adapter=adapter, model="base")])
        await self.removed.wait()
        yield pb.Members(adapters=[pb.NamedAdapter(name="sql", model="base")])
        await asyncio.Event().wait()

    def __init__(self) -> None:
        self.removed = asyncio.Event()


class NoMembership:
    def set_addresses(self, addresses: object) -> None: ...

    def note_ended(self, agents: object) -> None: ...

    def note_verdicts(self, verdicts: object) -> None: ...


async def test_a_router_follows_the_names_of_adapters() -> None:
    naming, names, server = Naming(), AdapterNames("base"), grpc.aio.server()
    cluster_pb2_grpc.add_MembershipServicer_to_server(naming, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = ControllerClient(f"127.0.0.1:{port}", None)
    serving = cast(Serving, SimpleNamespace(adapters=names))
    model = ServedModel("base", serving, cast(Membership, NoMembership()))
    apply = functools.partial(apply_members, model=model)
    following = asyncio.create_task(client.follow(apply))

    async def is_served(*wanted: str) -> bool:
        return tuple(names.served) == wanted

    await until(lambda: is_served("sql"))
    assert names.served["sql"] == Adapter(b"digest", "/a")
    naming.removed.set()
    await until(is_served)
    await cancel_all(following)
    await server.stop(None)


@contextlib.asynccontextmanager
async def controller(port: int) -> AsyncIterator[None]:
    server = grpc.aio.server()
    cluster_pb2_grpc.add_ControlServicer_to_server(Answering(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield
    await server.stop(None)


async def test_a_call_waits_for_a_slow_handshake() -> None:
    """As one does on crowded cores: it takes the connection, and greets later."""
    port = free_port()

    async def pass_on_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(SECONDS)
        further, beyond = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, beyond), copy(further, writer))

    async with controller(port):
        front = await asyncio.start_server(pass_on_late, "127.0.0.1", 0)
        slow = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
        assert (await ControllerClient(slow, None).pools()).decode == 2
        front.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while some := await reader.read(4096):
        writer.write(some)
    writer.close()


async def test_a_call_waits_for_a_restarting_controller() -> None:
    port = free_port()
    asked = asyncio.create_task(ControllerClient(f"127.0.0.1:{port}", None).pools())
    await asyncio.sleep(SECONDS)
    async with controller(port):
        assert (await asked).decode == 2


async def test_a_call_fails_when_the_controller_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller_client, "CALL_SECONDS", SECONDS)
    with pytest.raises(Unavailable, match="is away"):
        await ControllerClient(f"127.0.0.1:{free_port()}", None).pools()

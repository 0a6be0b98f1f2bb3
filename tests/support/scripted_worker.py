"""A real gRPC server that plays a worker's side of Attach from a script."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.core.types import PROTOCOL, Role
from baton.core.wire import role_to
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Welcomes routers; answers pings and reports its load until it is told not to."""

    device = ""

    def __init__(self, role: Role = Role.DECODE, name: str = "", model: str = "tiny") -> None:
        self.name = name or f"{role.value}-0"
        self.answers_pings = True
        self.reports = True
        self.draining = False
        self.fault = ""  # that it reports
        self.closes = False  # ends its stream in good order, at the next message
        self.attached = 0  # streams so far
        self.incarnation = secrets.randbits(60)
        self.verdicts: list[pb.Verdict] = []  # on earlier processes
        self.received: list[pb.RouterMessage] = []
        self._role = role
        self._model = model
        self._context: grpc.aio.ServicerContext[Any, Any] | None = None
        self._writing = asyncio.Lock()

    async def start(self, port: int = 0) -> str:
        """Returns its address once it serves."""
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def send(self, message: pb.WorkerMessage) -> None:
        """To the router that attached last."""
        assert self._context is not None
        await self._write(self._context, message)

    async def become(self, role: Role) -> None:
        """Reports another role to the router that attached last."""
        self._role = role
        switched = pb.RoleSwitched(welcome=self._welcome(), drain_seconds=0.1, switch_seconds=0.01)
        await self.send(pb.WorkerMessage(role_switched=switched))

    async def Attach(  # type: ignore[override]
        self,
        requests: AsyncIterator[pb.RouterMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await anext(aiter(requests))
        self.attached += 1
        self._context = context
        await self.send(pb.WorkerMessage(welcome=self._welcome()))
        reporting = asyncio.ensure_future(self._report(context))
        try:
            async for message in requests:
                self.received.append(message)
                if self.closes:
                    return
                if message.HasField("ping") and self.answers_pings:
                    await self._write(context, pb.WorkerMessage(pong=pb.Pong()))
        finally:
            reporting.cancel()

    async def _report(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            if self.reports:
                load = pb.Load(free_pages=9, fault=self.fault)
                await self._write(context, pb.WorkerMessage(load=load))
            await asyncio.sleep(0.02)

    async def _write(
        self, context: grpc.aio.ServicerContext[Any, Any], message: pb.WorkerMessage
    ) -> None:
        # A stream takes one message at a time.
        async with self._writing:
            await context.write(message)

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(
            worker_id=self.name,
            incarnation=self.incarnation,
            verdicts=self.verdicts,
            role=role_to(self._role),
            protocol=PROTOCOL,
            model=self._model,
            context_length=64,
            pool=PoolAddress(
                agent=f"agent of {self.name}",
                layout=PoolLayout(page_size=16),
                device=self.device,
            ),
            total_pages=9,
            draining=self.draining,
        )

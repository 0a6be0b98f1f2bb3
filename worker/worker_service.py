"""The worker's gRPC service: one Attach stream per router."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from baton.core.types import PROTOCOL, Role
from baton.core.wire import is_role, role_from
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.engine_thread import Attached, Detached, EngineInbox, FromRouter
from baton.worker.outbox import Outbox

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers pings on the event loop and passes the other messages to the engine's inbox."""

    def __init__(
        self,
        inbox: EngineInbox,
        outbox: Outbox,
        welcome: Callable[[], pb.Welcome],
        on_drain: Callable[[bool], None],
        on_switch: Callable[[Role], None],
    ) -> None:
        """`on_drain` gets True if the worker is to be restarted."""
        self._inbox = inbox
        self._outbox = outbox
        self._welcome = welcome
        self._on_drain = on_drain
        self._on_switch = on_switch
        self._attachments = itertools.count(1)

    async def Attach(  # type: ignore[override]
        self, requests: AsyncIterator[pb.RouterMessage], context: Context
    ) -> None:
        hello = await anext(aiter(requests), None)
        if hello is None or hello.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
        if hello.hello.protocol != PROTOCOL:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this worker speaks protocol {PROTOCOL}, the router {hello.hello.protocol}",
            )
        attachment = next(self._attachments)
        queue = self._outbox.attach(attachment)
        log.info("router %s attached", hello.hello.router_id)
        try:
            await context.write(pb.WorkerMessage(welcome=self._welcome()))
            self._inbox.put(Attached(attachment))
            await self._exchange(attachment, requests, queue, context)
        finally:
            self._outbox.detach(attachment)
            self._inbox.put(Detached(attachment))
            log.info("router %s detached", hello.hello.router_id)

    async def _exchange(
        self,
        attachment: int,
        requests: AsyncIterator[pb.RouterMessage],
        queue: asyncio.Queue[pb.WorkerMessage | None],
        context: Context,
    ) -> None:
        """Receives and sends until the router ends the stream, or either fails."""
        tasks = [
            asyncio.ensure_future(self._receive(attachment, requests, queue)),
            asyncio.ensure_future(self._send(queue, context)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _receive(
        self,
        attachment: int,
        requests: AsyncIterator[pb.RouterMessage],
        queue: asyncio.Queue[pb.WorkerMessage | None],
    ) -> None:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "ping":
                    queue.put_nowait(pb.WorkerMessage(pong=pb.Pong()))
                case "drain":
                    self._on_drain(message.drain.restart)
                case "switch_role" if is_role(message.switch_role.role):
                    self._on_switch(role_from(message.switch_role.role))
                case _:
                    self._inbox.put(FromRouter(attachment, message))

    async def _send(self, queue: asyncio.Queue[pb.WorkerMessage | None], context: Context) -> None:
        while (message := await queue.get()) is not None:
            await context.write(message)
        await context.write(pb.WorkerMessage(closing=pb.Closing()))
        # The router ends the stream. If the worker did, a write of the router would make its gRPC
        # drop messages that it has received but not read.
        await asyncio.Event().wait()

"""One router's side of the stream to one worker.

    connecting ─Welcome─▶ attached ─stream breaks─▶ connecting …

A link tries for ever, until it is stopped. Messages about an attempt go to the
inbox that was opened for it. When the stream breaks, every open inbox gets a
LinkLost: the worker lets go of everything by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import grpc

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from core.errors import LayoutMismatch, UnknownModel
from core.types import PROTOCOL, AttemptKey, Role
from core.wire import role_from

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
RECONNECT_SECONDS = 1.0

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # A peer whose host is gone says nothing: ask.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each link has a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The stream to a worker broke."""

    worker_id: str


Event = pb.WorkerMessage | LinkLost
Inbox = asyncio.Queue[Event]
Call = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]

_ATTEMPT_KINDS = ("first_token", "reserved", "pushed", "failed")


class WorkerLink:
    def __init__(
        self, address: str, router_id: str, model: str, on_change: Callable[[WorkerLink], None]
    ) -> None:
        self.address = address
        self.welcome: pb.Welcome | None = None
        self.load = pb.Load()
        self.fault = ""
        # For a prefill worker: the decode workers' agents that it was asked to
        # connect to, and its answers.
        self.asked: set[str] = set()
        self.peers: dict[str, pb.Connected] = {}
        # Prompt tokens that this router waits for there.
        self.pending_tokens = 0
        self._router_id = router_id
        self._model = model
        self._on_change = on_change
        self._inboxes: dict[AttemptKey, Inbox] = {}
        self._outgoing: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()

    @property
    def role(self) -> Role | None:
        return role_from(self.welcome.role) if self.welcome else None

    @property
    def worker_id(self) -> str:
        return self.welcome.worker_id if self.welcome else self.address

    @property
    def agent(self) -> str:
        """The worker's transport agent: another one after every start of its process."""
        return self.welcome.pool.agent if self.welcome else ""

    @property
    def active(self) -> int:
        """Attempts of this router that are open on the worker."""
        return len(self._inboxes)

    def open(self, key: AttemptKey, inbox: Inbox) -> None:
        self._inboxes[key] = inbox

    def close(self, key: AttemptKey) -> None:
        self._inboxes.pop(key, None)

    def send(self, message: pb.RouterMessage) -> None:
        """Queues a message. Dropped when the link is down: the attempt has its LinkLost."""
        if self.welcome is not None:
            self._outgoing.put_nowait(message)

    async def run(self) -> None:
        """Attaches, and attaches again, until cancelled."""
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            while True:
                try:
                    await self._attach(worker_pb2_grpc.WorkerStub(channel).Attach())
                except grpc.aio.AioRpcError as error:
                    self._note_fault(error.details() or error.code().name)
                except Exception as error:
                    log.exception("worker at %s", self.address)
                    self._note_fault(f"the worker cannot be understood: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    async def _attach(self, call: Call) -> None:
        writer: asyncio.Task[None] | None = None
        try:
            hello = pb.Hello(router_id=self._router_id, protocol=PROTOCOL)
            await call.write(pb.RouterMessage(hello=hello))
            writer = asyncio.ensure_future(self._write(call))
            while (message := await call.read()) is not grpc.aio.EOF:
                self._receive(cast(pb.WorkerMessage, message))
            self._note_fault("the worker closed the stream")
        finally:
            if writer:
                writer.cancel()
            call.cancel()
            self._lose()

    async def _write(self, call: Call) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._outgoing.get())

    def _receive(self, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "step":
            self._fan_out(message.step)
        elif kind in _ATTEMPT_KINDS:
            attempt = getattr(message, kind)
            inbox = self._inboxes.get(AttemptKey(attempt.request_id, attempt.epoch))
            if inbox is not None:
                inbox.put_nowait(message)
        elif kind == "load":
            self._note_load(message.load)
        elif kind == "welcome":
            self._greet(message.welcome)
        elif kind == "connected":
            self._note_connection(message.connected)

    def _greet(self, welcome: pb.Welcome) -> None:
        if welcome.model != self._model:
            raise UnknownModel(f"it serves {welcome.model!r}, this router {self._model!r}")
        role_from(welcome.role)
        self.welcome, self.fault = welcome, ""
        self._on_change(self)

    def _fan_out(self, step: pb.Step) -> None:
        for tokens in step.tokens:
            inbox = self._inboxes.get(AttemptKey(tokens.request_id, tokens.epoch))
            if inbox is not None:
                inbox.put_nowait(pb.WorkerMessage(step=pb.Step(tokens=[tokens])))

    def _note_connection(self, connected: pb.Connected) -> None:
        self.peers[connected.agent] = connected
        if connected.lost:
            self.ask_again(connected.agent)
        elif connected.error and connected.reason != LayoutMismatch.reason:
            loop = asyncio.get_running_loop()
            loop.call_later(RECONNECT_SECONDS, self.ask_again, connected.agent)
        self._on_change(self)

    def ask_again(self, agent: str) -> None:
        """As if the worker had never been asked to connect there."""
        self.asked.discard(agent)
        self.peers.pop(agent, None)
        self._on_change(self)

    def reaches(self, agent: str) -> bool:
        """Whether the worker can push to a decode worker's agent."""
        answer = self.peers.get(agent)
        return answer is not None and not answer.error and not answer.lost

    def mismatch(self, agent: str) -> str:
        """Why the worker will never push there; empty when it may."""
        answer = self.peers.get(agent)
        return answer.error if answer and answer.reason == LayoutMismatch.reason else ""

    def _note_load(self, load: pb.Load) -> None:
        changed = load.fault != self.load.fault
        self.load = load
        if changed:
            self._on_change(self)

    def _note_fault(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            log.warning("worker at %s: %s", self.address, fault)
            self._on_change(self)

    def _lose(self) -> None:
        lost = LinkLost(self.worker_id)
        self.welcome = None
        self.peers.clear()
        self.asked.clear()
        self.load = pb.Load()
        self._outgoing = asyncio.Queue()
        for inbox in self._inboxes.values():
            inbox.put_nowait(lost)
        self._on_change(self)

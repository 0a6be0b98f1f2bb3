"""One router's side of the stream to one worker.

    connecting ─Welcome─▶ attached ─first Load─▶ usable ─┐
        ▲                                                │ stream breaks, or the
        └────────────────────────────────────────────────┘ worker counts as lost

A link tries for ever, until it is stopped. A worker that changes its role stays
attached: it drains, and is usable again as what it is then. Messages about an attempt go to the
inbox that was opened for it. When the stream breaks, every open inbox gets a
LinkLost: the worker lets go of everything by itself, at once or, if it was
frozen, when it thaws.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol, cast

import grpc

from baton.core.config import RouterConfig
from baton.core.errors import LayoutMismatch, UnknownModel, WorkerLost
from baton.core.tls import Identity
from baton.core.types import PROTOCOL, AttemptKey, Role
from baton.core.wire import role_from, role_to
from baton.router.placement.placement import Suspicion
from baton.router.placement.worker_state import CacheIndex, PromptQueue
from baton.router.requests.attempt import AttemptEvent, LinkLost
from baton.router.workers.health import BusyShare, Heartbeat, PingFence, StepPace
from baton.rpc import open_channel
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.v1.transfer_pb2 import PoolAddress

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
RECONNECT_SECONDS = 1.0

Call = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]


class Inbox(Protocol):
    def put_nowait(self, event: AttemptEvent) -> None: ...


_ATTEMPT_KINDS = ("first_token", "reserved", "pushed", "failed")


class WorkerLink:
    def __init__(
        self,
        address: str,
        router_id: str,
        model: str,
        config: RouterConfig,
        on_change: Callable[[WorkerLink], None],
        on_report: Callable[[WorkerLink], None] = lambda link: None,
        on_lost: Callable[[WorkerLink], None] = lambda link: None,
        identity: Identity | None = None,
    ) -> None:
        """`on_change` is called when the worker comes, goes, or can be used for more or less,
        `on_report` with each Load, and `on_lost` when it goes, before its requests hear of it."""
        self._identity = identity
        self.address = address
        self.welcome: pb.Welcome | None = None
        self.load = pb.Load()
        self.reported = False  # a Load has come since Welcome
        self.fault = ""
        self.sick = ""  # what its last canary died of
        self.draining = False  # the worker takes nothing new
        self.leaving = False  # no longer a member: nothing new goes there
        # For a prefill worker: the decode workers' agents that it was asked to
        # connect to, and its answers.
        self.asked: set[str] = set()
        self.peers: dict[str, pb.Connected] = {}
        # Pages in its prefix cache, as far as it has told.
        self.cache = CacheIndex()
        # Which share of the last seconds its engine computed.
        self.busy = BusyShare()
        # How long its steps take, as this router sees them.
        self.pace = StepPace()
        # Prompts that it has yet to read.
        self.prompts = PromptQueue()
        # Of all prompt tokens that it has read for this router, those it had cached.
        self.read_tokens = 0
        self.hit_tokens = 0
        # Requests sent there that it has not begun, or promised pages for, yet.
        self.unanswered = 0
        # Requests there that have lost a worker before, and of them those that are
        # to be the only one.
        self.suspects = 0
        self.alone = 0
        self._name = ""
        self._router_id = router_id
        self._model = model
        self._config = config
        self._on_change = on_change
        self._on_report = on_report
        self._on_lost = on_lost
        self._fence = PingFence()
        self._inboxes: dict[tuple[str, int], Inbox] = {}  # by attempt
        self._outgoing: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        # For whoever waits for the worker to change its role.
        self._switch: asyncio.Future[pb.RoleSwitched] | None = None

    @property
    def role(self) -> Role | None:
        return role_from(self.welcome.role) if self.welcome else None

    @property
    def worker_id(self) -> str:
        """The name it was last known by; its address before that."""
        return self._name or self.address

    @property
    def agent(self) -> str:
        """The worker's transport agent: another one after every start of its process."""
        return self.pool.agent

    @property
    def total_pages(self) -> int:
        return self.welcome.total_pages if self.welcome else 0

    @property
    def pool(self) -> PoolAddress:
        return self.welcome.pool if self.welcome else PoolAddress()

    @property
    def usable(self) -> bool:
        """Whether new requests may go there."""
        sound = not (self.load.fault or self.sick)
        return self.reported and sound and not (self.draining or self.leaving)

    def has_room(self, suspicion: Suspicion = Suspicion.NONE) -> bool:
        """Whether a request may be sent there now."""
        if suspicion is Suspicion.ALONE and self.suspects:
            return False
        if suspicion is Suspicion.SUSPECT and self.alone:
            return False
        if suspicion is not Suspicion.NONE and not self._fence.is_open:
            return False
        return self.unanswered < self._config.worker_backlog

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

    def abandon(self, reason: str) -> None:
        """Has every request there go on elsewhere, though the worker lives."""
        self._tell_lost(LinkLost(self.worker_id, reason, died=False))

    def question(self) -> None:
        """Another worker was lost, and maybe this one too: it is to answer before a request that
        has lost a worker goes there."""
        if self.welcome is not None:
            self._ping()
            self._fence.close()

    def _ping(self) -> None:
        self._fence.ping_sent()
        self.send(pb.RouterMessage(ping=pb.Ping()))

    async def switch(self, role: Role) -> pb.RoleSwitched:
        """Has the worker change its role, and waits until it says how that ended. Nothing new is
        sent there meanwhile."""
        self._switch = asyncio.get_running_loop().create_future()
        self.send(pb.RouterMessage(switch_role=pb.SwitchRole(role=role_to(role))))
        self.draining = True
        self._on_change(self)
        return await self._switch

    async def run(self) -> None:
        """Attaches, and attaches again, until cancelled; once it is leaving, no more."""
        async with open_channel(self.address, self._identity) as channel:
            while not self.leaving:
                try:
                    await self._attach(worker_pb2_grpc.WorkerStub(channel).Attach())
                except grpc.aio.AioRpcError as error:
                    self._note_fault(_why(error))
                except Exception as error:
                    log.exception("worker at %s", self.address)
                    self._note_fault(f"the worker cannot be understood: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    async def _attach(self, call: Call) -> None:
        hello = pb.Hello(router_id=self._router_id, protocol=PROTOCOL)
        tasks: list[asyncio.Task[str]] = []
        reason = "its stream broke"
        try:
            await call.write(pb.RouterMessage(hello=hello))
            heartbeat = Heartbeat(
                self._config.ping_seconds,
                self._config.frozen_seconds,
                self._config.engine_stall_seconds,
            )
            work = (self._read(call, heartbeat), self._write(call), self._beat(heartbeat))
            tasks = [asyncio.ensure_future(each) for each in work]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = done.pop().result()
            self._note_fault(reason)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
            self._lose(reason)

    async def _read(self, call: Call, heartbeat: Heartbeat) -> str:
        while (message := await call.read()) is not grpc.aio.EOF:
            heartbeat.message_received()
            if cast(pb.WorkerMessage, message).HasField("load"):
                heartbeat.engine_reported()
            self._receive(cast(pb.WorkerMessage, message))
        return "the worker closed the stream"

    async def _write(self, call: Call) -> str:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._outgoing.get())
        # The reader learns why.
        await asyncio.Event().wait()
        return ""

    async def _beat(self, heartbeat: Heartbeat) -> str:
        """Pings for as long as the worker answers; then why it counts as lost."""
        # Links that came to be together do not ping together: tokens would wait for all of them.
        await asyncio.sleep(random.uniform(0.0, self._config.ping_seconds))
        while True:
            await asyncio.sleep(self._config.ping_seconds)
            if self.welcome is None:
                continue
            busy = bool(self.active or self.load.running or self.load.waiting)
            if reason := heartbeat.next_ping(busy=busy):
                return reason
            self._ping()

    def _receive(self, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "step":
            self._fan_out(message.step)
        elif kind in _ATTEMPT_KINDS:
            attempt = getattr(message, kind)
            inbox = self._inboxes.get((attempt.request_id, attempt.epoch))
            if inbox is not None:
                inbox.put_nowait(message)
        elif kind == "load":
            self._note_load(message.load)
        elif kind == "welcome":
            self._greet(message.welcome)
        elif kind == "connected":
            self._note_connection(message.connected)
        elif kind == "cache_events":
            if self.cache.apply(message.cache_events):
                self.send(pb.RouterMessage(resync_cache=pb.ResyncCache()))
        elif kind == "role_switched":
            self._greet_again(message.role_switched)
        elif kind == "pong":
            if self._fence.answer_received():
                self._on_change(self)
        elif kind == "draining":
            self.draining = True
            self._on_change(self)

    def _greet(self, welcome: pb.Welcome) -> None:
        if welcome.model != self._model:
            raise UnknownModel(f"it serves {welcome.model!r}, this router {self._model!r}")
        role_from(welcome.role)
        self.welcome, self.fault = welcome, ""
        self._name = welcome.worker_id
        self.draining = welcome.draining
        self._on_change(self)

    def _greet_again(self, switched: pb.RoleSwitched) -> None:
        if switched.welcome.role != (self.welcome.role if self.welcome else None):
            self.asked.clear()
            self.peers.clear()
            self.pace = StepPace()
            self.busy = BusyShare()
        self._greet(switched.welcome)
        if self._switch and not self._switch.done():
            self._switch.set_result(switched)

    def _fan_out(self, step: pb.Step) -> None:
        self.pace.step(step, time.monotonic())
        for tokens in step.tokens:
            inbox = self._inboxes.get((tokens.request_id, tokens.epoch))
            if inbox is not None:
                inbox.put_nowait(tokens)

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

    def note_canary(self, problem: str) -> None:
        """How the worker's last test went; empty when well."""
        if problem != self.sick:
            self.sick = problem
            self._on_change(self)

    def _note_load(self, load: pb.Load) -> None:
        changed = load.fault != self.load.fault or not self.reported
        self.load, self.reported = load, True
        self.prompts.report(load.queued_tokens)
        self.busy.report(load.up_seconds, load.busy_seconds)
        if changed:
            self._on_change(self)
        self._on_report(self)

    def _note_fault(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            log.warning("worker at %s: %s", self.address, fault)
            self._on_change(self)

    def _lose(self, reason: str) -> None:
        lost = LinkLost(self.worker_id, reason, company=self.suspects > 1)
        if self.welcome is not None:
            self._on_lost(self)
        self.welcome = None
        self._fence = PingFence()
        self.peers.clear()
        self.asked.clear()
        self.load = pb.Load()
        self.prompts.report(0)
        self.cache = CacheIndex()
        self.pace = StepPace()
        self.busy = BusyShare()
        self.reported = self.draining = False
        self.sick = ""
        self._outgoing = asyncio.Queue()
        if self._switch and not self._switch.done():
            self._switch.set_exception(WorkerLost(f"worker {self.worker_id} was lost: {reason}"))
        self._tell_lost(lost)
        self._on_change(self)

    def _tell_lost(self, lost: LinkLost) -> None:
        for inbox in self._inboxes.values():
            inbox.put_nowait(lost)


def _why(error: grpc.aio.AioRpcError) -> str:
    """In words for operators: of a connection that fails, gRPC names every address first."""
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"it cannot be reached: {details.rpartition(': ')[2]}"
    return details

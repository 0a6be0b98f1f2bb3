"""One router's side of the stream to one worker.

    connecting ─Welcome─▶ attached ─first Load─▶ usable ─┐
        ▲                                                │ the stream breaks, or the
        └────────────────────────────────────────────────┘ heartbeat finds the worker lost

A link reconnects until it is stopped. A worker that switches its role stays attached: it drains,
and is usable again in the new role. Messages about an attempt go to the sink opened for it. When
the stream breaks, every open sink gets a LinkLost. The worker then releases everything by itself;
a frozen worker does when it continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Set
from typing import TypeAlias, cast

import grpc

from baton.core.config import RouterConfig
from baton.core.errors import LayoutMismatch, UnknownModel, WorkerLost
from baton.core.process import cancel_all
from baton.core.tls import Identity
from baton.core.types import PROTOCOL, AttemptKey, Role
from baton.core.wire import role_from, role_to
from baton.router.placement.placement import Suspicion
from baton.router.placement.worker_state import CacheIndex, PromptQueue
from baton.router.requests.attempt import AttemptEvent, LinkLost
from baton.router.requests.verdicts import Loss
from baton.router.workers.host_holds import HostHolds
from baton.router.workers.link_state import (
    AssignedRequests,
    BusyShare,
    Heartbeat,
    Peers,
    PingFence,
    StepPace,
)
from baton.rpc import open_channel
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.v1.transfer_pb2 import PoolAddress

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
RECONNECT_SECONDS = 1.0
CLOSED = "the worker closed the stream"

Call = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]
Sink: TypeAlias = Callable[[AttemptEvent], None]


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
        holds: HostHolds | None = None,
    ) -> None:
        """`on_change` is called when the worker's usability changes, `on_report` after each Load,
        and `on_lost` when it is lost, before its requests are notified."""
        self._identity = identity
        self._holds = holds or HostHolds()
        self.address = address
        self.host = address.rpartition(":")[0]
        self.fault = ""  # why the stream broke
        self.loss: Loss | None = None  # the last; None if the worker closed the stream
        self.leaving = False  # no longer a member: it gets no new requests
        self.prompts = PromptQueue()
        self.assigned = AssignedRequests(config.worker_backlog)
        self._name = ""
        self._router_id = router_id
        self._model = model
        self._config = config
        self._on_change = on_change
        self._on_report = on_report
        self._on_lost = on_lost
        self.paused_at = 0.0  # when it last reported paused requests
        self._sinks: dict[tuple[str, int], Sink] = {}  # by attempt
        self._switch: asyncio.Future[pb.RoleSwitched] | None = None  # the pending role switch
        self._reset()

    def _reset(self) -> None:
        """Resets everything that came over the last stream."""
        self.welcome: pb.Welcome | None = None
        self.load = pb.Load()
        self.reported = False  # a Load has come since Welcome
        self.canary_error = ""  # why the last canary failed
        self.draining = False  # the worker takes no new requests
        self.peers = Peers()
        self.cache = CacheIndex()  # pages in its prefix cache, as reported
        self.busy = BusyShare()
        self.pace = StepPace()
        self._fence = PingFence()
        self._announced: Set[str] = frozenset()  # ended agents that the worker was sent
        self._outgoing: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()

    @property
    def role(self) -> Role | None:
        return role_from(self.welcome.role) if self.welcome else None

    @property
    def worker_id(self) -> str:
        """The worker's last known name; before any, its address."""
        return self._name or self.address

    def has_adapter(self, digest: bytes) -> bool:
        """True if the worker has loaded the adapter, or will for one of its requests."""
        return digest in self.assigned.adapters or digest in self.load.adapters

    @property
    def agent(self) -> str:
        """The worker's transport agent; each process has a new one."""
        return self.pool.agent

    @property
    def total_pages(self) -> int:
        return self.welcome.total_pages if self.welcome else 0

    @property
    def pool(self) -> PoolAddress:
        return self.welcome.pool if self.welcome else PoolAddress()

    @property
    def takes_requests(self) -> bool:
        """True if it would take new requests, healthy or not."""
        return self.reported and not (self.draining or self.leaving)

    @property
    def usable(self) -> bool:
        """True if it may get new requests."""
        return self.takes_requests and not (self.load.fault or self.canary_error)

    def has_room(self, suspicion: Suspicion = Suspicion.NONE, *, background: bool = False) -> bool:
        """True if a request may be sent there now. A background one may not if it would pause."""
        if background and (self.assigned.live or self.load.paused or self._holds.is_busy(self)):
            return False
        fenced = suspicion is not Suspicion.NONE and not self._fence.is_open
        return not fenced and self.assigned.admits(suspicion)

    def count_live(self, change: int) -> None:
        """Counts attempts of live requests that begin or end there."""
        self.assigned.live += change
        self._holds.count(self.host, change)

    def hold(self, *, pause: bool) -> None:
        """Pauses or continues its background requests."""
        self.send(pb.RouterMessage(hold=pb.Hold(pause=pause)))

    @property
    def has_requests(self) -> bool:
        """True if its engine has work, from this router or another."""
        load = self.load
        return bool(self.active or load.running or load.waiting or load.paused)

    @property
    def active(self) -> int:
        """Number of this router's open attempts on the worker."""
        return len(self._sinks)

    def open(self, key: AttemptKey, sink: Sink) -> None:
        """Passes every message about an attempt to `sink` until `close`."""
        self._sinks[key] = sink

    def close(self, key: AttemptKey) -> None:
        self._sinks.pop(key, None)

    def send(self, message: pb.RouterMessage) -> None:
        """Queues a message. Drops it while the link is down: attempts have had their LinkLost."""
        if self.welcome is not None:
            self._outgoing.put_nowait(message)

    def migrate_requests(self, reason: str) -> None:
        """Migrates every request there, though the worker was not lost."""
        self._notify_attempts(LinkLost(self.worker_id, reason))

    def fence(self) -> None:
        """Closes the fence after another worker was lost: suspects are sent here only after the
        answer to a new ping."""
        if self.welcome is not None:
            self._ping()
            self._fence.close()

    def _ping(self) -> None:
        self._fence.ping_sent()
        self.send(pb.RouterMessage(ping=pb.Ping()))

    def connect(self, decode: WorkerLink) -> None:
        """Asks a prefill worker to connect to a decode worker, once for each of its processes."""
        if decode.welcome and self.peers.ask(decode.agent):
            connect = pb.Connect(worker_id=decode.worker_id, pool=decode.welcome.pool)
            self.send(pb.RouterMessage(connect=connect))

    def disconnect(self, agent: str) -> None:
        """Forgets a connection, so that it is made anew."""
        self.peers.forget(agent)
        self._on_change(self)

    def announce_ended(self, agents: Set[str]) -> None:
        """Sends the worker the ended agents that it has not been sent on this stream."""
        if self.welcome is not None:
            for agent in agents - self._announced:
                self.send(pb.RouterMessage(sender_gone=pb.SenderGone(agent=agent)))
            self._announced = frozenset(agents)

    async def switch(self, role: Role) -> pb.RoleSwitched:
        """Switches the worker's role and returns its answer. It gets no new requests meanwhile."""
        self._switch = asyncio.get_running_loop().create_future()
        self.send(pb.RouterMessage(switch_role=pb.SwitchRole(role=role_to(role))))
        self.draining = True
        self._on_change(self)
        return await self._switch

    def note_canary(self, problem: str) -> None:
        """Notes the result of the worker's canary; "" means that it passed."""
        if problem != self.canary_error:
            self.canary_error = problem
            self._on_change(self)

    async def run(self) -> None:
        """Attaches repeatedly, until cancelled or leaving."""
        async with open_channel(self.address, self._identity) as channel:
            while not self.leaving:
                await self._attach(worker_pb2_grpc.WorkerStub(channel).Attach())
                await asyncio.sleep(RETRY_SECONDS)

    async def _attach(self, call: Call) -> None:
        hello = pb.Hello(router_id=self._router_id, protocol=PROTOCOL)
        tasks: list[asyncio.Task[str]] = []
        reason = "this router ended the stream"
        config = self._config
        heartbeat = Heartbeat(
            config.ping_seconds, config.frozen_seconds, config.engine_stall_seconds
        )
        try:
            await call.write(pb.RouterMessage(hello=hello))
            work = (self._read(call, heartbeat), self._write(call), self._beat(heartbeat))
            tasks = [asyncio.ensure_future(each) for each in work]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = done.pop().result()
        except grpc.aio.AioRpcError as error:
            reason = _reason(error)
        except Exception as error:
            log.exception("worker at %s", self.address)
            reason = f"the worker sent an invalid message: {error}"
        finally:
            await cancel_all(*tasks)
            call.cancel()
            process = self.welcome.incarnation if self.welcome else 0
            loss = Loss(process, hung=heartbeat.is_stalled)
            self._lose(reason, None if reason == CLOSED else loss)
        self._note_fault(reason)

    async def _read(self, call: Call, heartbeat: Heartbeat) -> str:
        while (message := await call.read()) is not grpc.aio.EOF:
            heartbeat.message_received()
            if not self._receive(cast(pb.WorkerMessage, message), heartbeat):
                break
        return CLOSED

    async def _write(self, call: Call) -> str:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._outgoing.get())
        # `_read` returns the reason.
        await asyncio.Event().wait()
        return ""

    async def _beat(self, heartbeat: Heartbeat) -> str:
        """Pings while the worker answers. Returns why it is lost."""
        # Spread over time: tokens would wait for the pings of links made at the same moment.
        await asyncio.sleep(random.uniform(0.0, self._config.ping_seconds))
        while True:
            await asyncio.sleep(self._config.ping_seconds)
            if self.welcome is None:
                continue
            if reason := heartbeat.next_ping(busy=self.has_requests):
                return reason
            self._ping()

    def _receive(self, message: pb.WorkerMessage, heartbeat: Heartbeat) -> bool:
        """Handles a message. Returns False after the worker's last one."""
        match message.WhichOneof("kind"):
            case "step":
                self.pace.step(message.step, time.monotonic())
                for tokens in message.step.tokens:
                    if sink := self._sinks.get((tokens.request_id, tokens.epoch)):
                        sink(tokens)
            case "first_token" | "reserved" | "pushed" | "failed" as kind:
                attempt = getattr(message, kind)
                if sink := self._sinks.get((attempt.request_id, attempt.epoch)):
                    sink(message)
            case "load":
                heartbeat.engine_reported()
                self._note_load(message.load)
            case "welcome":
                self._note_welcome(message.welcome)
            case "connected":
                self._note_connection(message.connected)
            case "cache_events":
                if self.cache.apply(message.cache_events):
                    self.send(pb.RouterMessage(resync_cache=pb.ResyncCache()))
            case "role_switched":
                self._note_role(message.role_switched)
            case "pong":
                if self._fence.answer_received():
                    self._on_change(self)
            case "draining":
                self.draining = True
                self._on_change(self)
            case "closing":
                return False
        return True

    def _note_welcome(self, welcome: pb.Welcome) -> None:
        if welcome.model != self._model:
            raise UnknownModel(f"it serves {welcome.model!r}, this router needs {self._model!r}")
        role_from(welcome.role)
        self.welcome, self.fault, self._announced = welcome, "", frozenset()
        self._name = welcome.worker_id
        self.cache.windowed = any(welcome.pool.layout.windows[:1])
        self.draining = welcome.draining
        if welcome.pool.device == "cpu":
            self._holds.add(self)
        self._on_change(self)

    def _note_role(self, switched: pb.RoleSwitched) -> None:
        if switched.welcome.role != (self.welcome.role if self.welcome else None):
            self.peers, self.pace, self.busy = Peers(), StepPace(), BusyShare()
        self._note_welcome(switched.welcome)
        if self._switch and not self._switch.done():
            self._switch.set_result(switched)

    def _note_connection(self, connected: pb.Connected) -> None:
        self.peers.answer(connected)
        if connected.lost:
            self.disconnect(connected.agent)
        elif connected.error and connected.reason != LayoutMismatch.reason:
            loop = asyncio.get_running_loop()
            loop.call_later(RECONNECT_SECONDS, self.disconnect, connected.agent)
        self._on_change(self)

    def _note_load(self, load: pb.Load) -> None:
        changed = load.fault != self.load.fault or not self.reported
        changed |= bool(self.load.paused and not load.paused)  # others may now be sent there
        self.load, self.reported = load, True
        if load.paused:
            self.paused_at = time.monotonic()
            self.pace.interrupt()
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

    def _lose(self, reason: str, loss: Loss | None) -> None:
        self.loss = loss
        if self.welcome is not None:
            self._on_lost(self)
        self._holds.remove(self)
        self._reset()
        self.prompts.report(0)
        if self._switch and not self._switch.done():
            self._switch.set_exception(WorkerLost(f"worker {self.worker_id} was lost: {reason}"))
        self._notify_attempts(LinkLost(self.worker_id, reason, loss))
        self._on_change(self)

    def _notify_attempts(self, lost: LinkLost) -> None:
        for sink in self._sinks.values():
            sink(lost)


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Returns the reason for operators. gRPC puts all addresses before that of a failed
    connection."""
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"it cannot be reached: {details.rpartition(': ')[2]}"
    return details

"""A simulated router: the real attempts, retries and policy, on simulated streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.core.errors import BatonError, Cancelled, Unavailable, WorkerLost
from baton.core.types import AttemptKey, Role, Work
from baton.core.wire import role_from
from baton.router.placement.placement import FetchPlan, Placement, Snapshot, Suspicion
from baton.router.placement.policy import choose
from baton.router.requests.attempt import (
    Action,
    Attempt,
    AttemptEnded,
    AttemptEvent,
    LinkLost,
    Send,
    Tokens,
)
from baton.router.requests.retries import RetryState
from baton.router.requests.verdicts import Loss, Losses
from baton.router.workers.link_state import AssignedRequests
from baton.v1 import worker_pb2 as pb
from tests.support.snapshots import DecodeView, PrefillView, cluster

from .engine import Windows, reference
from .streams import Stream
from .world import Violation, World

MAX_DEATHS, MAX_ATTEMPTS = 2, 8
PLACEMENT_SECONDS = 20.0
PLACEMENT_POLL_SECONDS = 0.25
LOCAL_PREFILL_AFTER = 2.0
SILENCE_SECONDS = 40.0
ATTACH_SECONDS = 0.2
RECONNECT_SECONDS = 1.0
_ATTEMPT_KINDS = ("first_token", "reserved", "pushed", "failed")


@dataclass(eq=False, slots=True)
class Link:
    """What a router knows of one worker."""

    worker_id: str
    stream: Stream | None = None
    welcome: pb.Welcome | None = None
    asked: set[str] = field(default_factory=set)
    reaches: set[str] = field(default_factory=set)
    assigned: AssignedRequests = field(default_factory=lambda: AssignedRequests(1 << 30))

    @property
    def agent(self) -> str:
        return self.welcome.pool.agent if self.welcome else ""

    def is_role(self, role: Role) -> bool:
        return self.welcome is not None and role_from(self.welcome.role) is role

    def send(self, message: pb.RouterMessage) -> None:
        if self.welcome is not None and self.stream is not None:
            self.stream.to_worker(message)


class SimulatedRequest:
    """One request, and its client: checks every token that comes."""

    def __init__(self, work: Work, windows: Windows = (None,)) -> None:
        self.work = work
        self.retries = RetryState(work, max_deaths=MAX_DEATHS, max_attempts=MAX_ATTEMPTS)
        self.expected = reference(work, windows)
        self.received: list[int] = []
        self.attempt: Attempt | None = None
        self.suspicion = Suspicion.NONE  # of the attempt
        self.outcome = ""  # "finished", or the error's reason
        self.waits_since = 0.0
        self.events = 0

    @property
    def name(self) -> str:
        return self.work.key.request_id

    def receive(self, tokens: Tokens) -> None:
        self.retries.emitted(tokens)
        self.received += tokens.token_ids
        if self.received != self.expected[: len(self.received)]:
            raise Violation(f"{self.name} received {self.received}, expected {self.expected}")
        if tokens.finish:
            if self.received != self.expected:
                raise Violation(f"{self.name} ended early: {self.received} of {self.expected}")
            self.outcome = "finished"


class SimulatedRouter:
    def __init__(
        self,
        world: World,
        name: str,
        attach: Callable[[SimulatedRouter, str], Stream | None],
        *,
        fetches: bool = False,
    ) -> None:
        """`attach` opens a stream to the worker of a name, if one can be had now."""
        self.name = name
        self.fetches = fetches
        self.placed = 0
        self.dead = False
        self.requests: dict[str, SimulatedRequest] = {}
        self.links: dict[str, Link] = {}
        self._world = world
        self._attach = attach
        self._agents: dict[str, str] = {}  # the last one seen, by worker
        self._ended: list[str] = []  # agents of processes that have ended
        self._no_pair_since = 0.0
        self._losses = Losses()

    def watch(self, worker_id: str) -> None:
        """Attaches to a worker, and again whenever the stream breaks."""
        link = self.links.setdefault(worker_id, Link(worker_id))
        if self.dead or link.stream is not None:
            return
        link.stream = self._attach(self, worker_id)
        if link.stream is None:
            self._world.after(ATTACH_SECONDS, lambda: self._try_again(worker_id))

    def _try_again(self, worker_id: str) -> None:
        if any(not request.outcome for request in self.requests.values()):
            self.watch(worker_id)

    def submit(self, request: SimulatedRequest) -> None:
        self.requests[request.name] = request
        request.waits_since = self._world.now
        for worker_id in self.links:
            self.watch(worker_id)
        self._place(request)

    def cancel(self, request: SimulatedRequest) -> None:
        if not request.outcome:
            self._fail(request, Cancelled("the client went away"))

    def die(self) -> None:
        self.dead = True
        for link in self.links.values():
            if link.stream is not None:
                link.stream.cut("the router died")
        for request in self.requests.values():
            request.outcome = request.outcome or "ROUTER_DIED"
            request.attempt = None

    # What streams bring.

    def on_message(self, stream: Stream, message: pb.WorkerMessage) -> None:
        link = self.links[stream.worker.worker_id]
        if self.dead or link.stream is not stream:
            return
        kind = message.WhichOneof("kind")
        if kind == "step":
            for tokens in message.step.tokens:
                self._hear(AttemptKey(tokens.request_id, tokens.epoch), tokens)
        elif kind in _ATTEMPT_KINDS:
            attempt = getattr(message, kind)
            self._hear(AttemptKey(attempt.request_id, attempt.epoch), message)
        elif kind == "welcome":
            self._greet(link, message.welcome)
        elif kind == "role_switched":
            link.asked.clear()
            link.reaches.clear()
            self._greet(link, message.role_switched.welcome)
        elif kind == "connected":
            self._note_connection(link, message.connected)

    def on_lost(self, stream: Stream, reason: str, *, died: bool) -> None:
        link = self.links[stream.worker.worker_id]
        if self.dead or link.stream is not stream:
            return
        self._world.log(self.name, f"lost {link.worker_id}: {reason}")
        loss = Loss(link.welcome.incarnation if link.welcome else 0)
        self._losses.add(loss)
        link.stream = link.welcome = None
        link.asked.clear()
        link.reaches.clear()
        self._note_pair()
        lost = LinkLost(link.worker_id, reason, loss if died else None)
        culprits = self.requests.keys() & stream.worker.engine.crashes_at
        for request in list(self.requests.values()):
            attempt = request.attempt
            if attempt and link.worker_id in (attempt.placement.prefill, attempt.placement.decode):
                culprits -= {request.name}
                self._take(request, attempt, lost)
        if culprits:  # whose attempt had ended: its other worker was lost at the same moment
            stream.worker.judged = False
        self._world.after(ATTACH_SECONDS, lambda: self.watch(link.worker_id))

    # Workers, and who reaches whom.

    def _greet(self, link: Link, welcome: pb.Welcome) -> None:
        link.welcome = welcome
        self._losses.judge(welcome.verdicts)
        self._losses.revive(welcome.incarnation)
        before = self._agents.get(link.worker_id, link.agent)
        self._agents[link.worker_id] = link.agent
        if before != link.agent:
            self._ended.append(before)
        # A worker that was not attached then is told when it is.
        for worker in self.links.values():
            for agent in self._ended:
                worker.send(pb.RouterMessage(sender_gone=pb.SenderGone(agent=agent)))
        self._connect_all()

    def _connect_all(self) -> None:
        for prefill in self._attached(Role.PREFILL):
            for decode in self._attached(Role.DECODE):
                if decode.welcome and decode.agent not in prefill.asked:
                    prefill.asked.add(decode.agent)
                    connect = pb.Connect(worker_id=decode.worker_id, pool=decode.welcome.pool)
                    prefill.send(pb.RouterMessage(connect=connect))

    def _note_connection(self, link: Link, connected: pb.Connected) -> None:
        if connected.error:
            link.reaches.discard(connected.agent)
            self._world.after(RECONNECT_SECONDS, lambda: self._ask_again(link, connected.agent))
        elif connected.lost:
            self._ask_again(link, connected.agent)
        else:
            link.reaches.add(connected.agent)
        self._note_pair()

    def _ask_again(self, link: Link, agent: str) -> None:
        link.asked.discard(agent)
        link.reaches.discard(agent)
        self._connect_all()

    def _attached(self, role: Role) -> Iterator[Link]:
        return (link for link in self.links.values() if link.is_role(role))

    def _note_pair(self) -> None:
        if any(self._snapshot().prefill.reaches):
            self._no_pair_since = self._world.now

    def _snapshot(self, suspicion: Suspicion = Suspicion.NONE) -> Snapshot:
        decode = list(self._attached(Role.DECODE))
        return cluster(
            prefill=[
                PrefillView(
                    link.worker_id,
                    self._load(link),
                    frozenset(other.worker_id for other in decode if other.agent in link.reaches),
                    link.assigned.admits(suspicion),
                )
                for link in self._attached(Role.PREFILL)
            ],
            decode=[
                DecodeView(link.worker_id, self._load(link), 0, link.assigned.admits(suspicion))
                for link in decode
            ],
            local_prefill=self._world.now - self._no_pair_since > LOCAL_PREFILL_AFTER,
            turn=self.placed,
        )

    def _load(self, link: Link) -> int:
        attempts = [request.attempt for request in self.requests.values() if request.attempt]
        placements = [attempt.placement for attempt in attempts]
        return sum(link.worker_id in (place.prefill, place.decode) for place in placements)

    # Requests.

    def _place(self, request: SimulatedRequest) -> None:
        if request.outcome or self.dead:
            return
        self._note_pair()
        snapshot = self._snapshot(request.retries.suspicion)
        placed = choose(snapshot, one_token=request.retries.work.tokens_wanted == 1)
        if isinstance(placed, Placement):
            self._begin(request, placed)
        elif (
            isinstance(placed, Unavailable)
            and self._world.now - request.waits_since > PLACEMENT_SECONDS
        ):
            self._fail(request, placed)
        else:
            self._world.after(PLACEMENT_POLL_SECONDS, lambda: self._place(request))

    def _begin(self, request: SimulatedRequest, placement: Placement) -> None:
        if request.attempt is not None:
            raise Violation(f"{request.name} has two live attempts")
        self.placed += 1
        placement = self._with_fetch(placement)
        request.suspicion = request.retries.suspicion
        self._count_suspect(request, placement, +1)
        work = request.retries.begin(placement)
        holder = placement.fetch.holder if placement.fetch else ""
        names = placement.prefill, placement.decode, holder
        agents = [self.links[name].agent if name else "" for name in names]
        attempt = request.attempt = Attempt(work, placement, *agents)
        self._world.log(self.name, f"{work.key} goes to {placement}")
        self._send(attempt, attempt.start())
        self._watch_silence(request, attempt)

    def _count_suspect(self, request: SimulatedRequest, placement: Placement, change: int) -> None:
        for name in filter(None, (placement.prefill, placement.decode)):
            self.links[name].assigned.count_suspect(request.suspicion, change)

    def _with_fetch(self, placement: Placement) -> Placement:
        """Has prefill fetch from some decode worker. Whether it has anything is a guess, and so
        is how long that may take."""
        draw, decode = self._world.random, list(self._attached(Role.DECODE))
        if not (self.fetches and placement.prefill and decode and draw.random() < 0.7):
            return placement
        pages, seconds = draw.choice((1, 3, 9, 9)), draw.choice((0.01, 0.02, 0.03, 0.05, 0.5))
        fetch = FetchPlan(draw.choice(decode).worker_id, pages, 0, seconds)
        return dataclasses.replace(placement, fetch=fetch)

    def _watch_silence(self, request: SimulatedRequest, attempt: Attempt) -> None:
        events = request.events

        def check() -> None:
            if request.attempt is not attempt:
                return
            if request.events == events:
                raise Violation(f"{attempt.work.key} hangs")
            self._watch_silence(request, attempt)

        self._world.after(SILENCE_SECONDS, check)

    def _hear(self, key: AttemptKey, message: AttemptEvent) -> None:
        request = self.requests.get(key.request_id)
        attempt = request.attempt if request else None
        if request is not None and attempt is not None and attempt.work.key == key:
            self._take(request, attempt, message)

    def _take(self, request: SimulatedRequest, attempt: Attempt, event: AttemptEvent) -> None:
        request.events += 1
        actions: list[Action] = attempt.handle(event)
        for action in actions:
            if isinstance(action, Tokens):
                self._world.log(self.name, f"{attempt.work.key} emits {action.token_ids}")
                request.receive(action)
                if request.outcome:
                    self._release(request)
                    return
            elif isinstance(action, AttemptEnded):
                self._end(request, attempt, action)
                return
            else:
                self._send(attempt, [action])

    def _end(self, request: SimulatedRequest, attempt: Attempt, ended: AttemptEnded) -> None:
        self._world.log(self.name, f"{attempt.work.key} ended: {ended.error!r}")
        self._release(request)
        self._check_silence(attempt, ended)
        placement = attempt.placement
        if isinstance(ended.error, WorkerLost) and placement.prefill and placement.decode:
            prefill, decode = self.links[placement.prefill], self.links[placement.decode]
            if prefill.welcome and decode.welcome:
                self._ask_again(prefill, decode.agent)
        request.retries.end(ended)
        self._decide(request, self._world.now + PLACEMENT_SECONDS)

    def _decide(self, request: SimulatedRequest, give_up_at: float) -> None:
        """Waits for the verdict that decides over the request, where there is one to wait for."""
        if request.outcome or self.dead:
            return
        if request.retries.awaits_verdict and self._world.now < give_up_at:
            self._world.after(PLACEMENT_POLL_SECONDS, lambda: self._decide(request, give_up_at))
            return
        error = request.retries.decide()
        if error is not None:
            self._fail(request, error)
        else:
            request.waits_since = self._world.now
            self._world.after(request.retries.delay, lambda: self._place(request))

    def _check_silence(self, attempt: Attempt, ended: AttemptEnded) -> None:
        """Who says that a peer is silent must not count as connected to it."""
        silent = "the receiving worker has been silent" in ended.error.message
        if silent and attempt._decode_agent in self.links[attempt.placement.prefill].reaches:
            raise Violation(f"{attempt.work.key} found a silent peer that counts as connected")

    def _fail(self, request: SimulatedRequest, error: BatonError) -> None:
        self._world.log(self.name, f"{request.name} fails: {error!r}")
        self._release(request)
        request.outcome = error.reason

    def _release(self, request: SimulatedRequest) -> None:
        attempt, request.attempt = request.attempt, None
        if attempt is not None:
            self._count_suspect(request, attempt.placement, -1)
            self._send(attempt, attempt.release())

    def _send(self, attempt: Attempt, sends: list[Send]) -> None:
        for send in sends:
            placement = attempt.placement
            name = placement.prefill if send.role is Role.PREFILL else placement.decode
            self.links[name].send(send.message)

"""The controller: owns the pools, knows the members, tells the routers. On no request's path.

    Fleet (which workers there are to be) ─tend, once a second and after each change─▶ actors
    members ─update, once a second each─▶ who serves where ─Membership.Watch─▶ routers

It is an actor that outlives whoever made it, and Ray starts it again when it
dies. The fleet is in Ray's store, and everything else it learns again, since
every member tells about itself once a second. A controller that was started
again listens on the same port, and tells the routers nothing before it has heard
from every worker it expects, or has waited long enough for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable

import grpc
import ray

from baton.cluster import store
from baton.cluster.census import Census
from baton.cluster.control import Control
from baton.cluster.fleet import Fleet
from baton.cluster.joining import whole
from baton.cluster.live_planner import LivePlanner
from baton.cluster.member import CONTROLLER, DRAINED, DRAINING, Member, is_worker
from baton.cluster.membership import Membership
from baton.cluster.planning import Planning
from baton.cluster.role_changes import RoleChanges
from baton.cluster.worker_actors import WorkerActors, drain, gpus_of, kill
from baton.core import config as configs
from baton.core.errors import InvalidRequest, RoleRefused, Unavailable
from baton.core.tls import Identity, node_identity
from baton.core.types import MAX_MESSAGE_BYTES, Role
from baton.core.wire import role_to
from baton.planner.sizing import Pools, other
from baton.rpc import listen
from baton.v1 import cluster_pb2, cluster_pb2_grpc

log = logging.getLogger(__name__)

REMEMBERED = 256
"""Ended processes that routers are told of, and drained workers that operators are."""

LEARNING_SECONDS = 5.0
"""How long a controller that has just started waits for members it expects."""

TEND_SECONDS = 1.0
"""Between two looks at the actors that there are."""

DRAIN_SECONDS = 15.0
"""Beyond `drain_seconds`: a worker that has not drained by then is ended all the same."""

SWITCH_SECONDS = 30.0
"""Beyond `drain_seconds`: a worker that has not changed its role by then goes on as it was."""

MOST_WORKERS = 1024
"""Of a pool: more are a slip of the finger."""

TETHER_LOOKS = 3
"""In how many looks in a row the tether must be missing to count as gone."""


class Controller:
    """A Ray actor. Its methods carry control, never tokens or pages."""

    def __init__(
        self, address: str, tree: dict[str, object], gpus: float, *, joined: bool, tether: str
    ) -> None:
        """`address` is where to listen, ":PORT" at whatever address this node has. `tree` is the
        cluster's configuration; `gpus` and `joined` are as for WorkerActors.

        When no actor is called `tether` any more, whoever started the cluster is gone, and
        everything ends. Empty where it is to go on.
        """
        config = configs.parse(tree)
        logging.basicConfig(level=config.log_level.upper())
        self._actors = WorkerActors(config, gpus, joined=joined)
        self._drain_seconds = config.drain_seconds + DRAIN_SECONDS
        self._does_without_prefill = config.router.local_prefill != "never"
        self._role_changes = RoleChanges(config.drain_seconds + SWITCH_SECONDS, time.monotonic)
        self._tether = tether
        self._untethered = 0  # looks in a row
        self._fleet = store.load()
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._census = Census()
        self._deadlines: dict[str, float] = {}  # of workers that drain
        self._waits: dict[Role, str] = {}  # what workers that nobody has heard of wait for
        self._drained: deque[Member] = deque(maxlen=REMEMBERED)
        self._ended: deque[str] = deque(maxlen=REMEMBERED)  # their transport agents
        on_gpus = gpus_of(config, Role.DECODE, gpus) > 0
        self.planning = Planning(config, gpus=on_gpus) if config.planner.enabled else None
        self._membership = Membership(self._note_report)
        self._serve(whole(address), node_identity(config))
        self._learning = asyncio.ensure_future(self._learn())
        self._tending = asyncio.ensure_future(self._tend())
        self._tending.add_done_callback(_give_up)
        if self.planning:
            planner = LivePlanner(self, self.planning)
            self._running_plan = asyncio.ensure_future(planner.run())
            self._running_plan.add_done_callback(_stop_planning)

    async def update(self, member: Member) -> None:
        """A process tells how far it is. A restarted one replaces its earlier self."""
        name = member.worker_id
        if member.role and name not in self._fleet.workers:
            return  # it is about to be ended
        before = self._census.note(member)
        if before and before.agent not in ("", member.agent):
            self._ended.append(before.agent)
        if member.progress == DRAINING:
            self._changed.set()
        if self._has_learned:
            await self._publish()

    async def members(self) -> list[Member]:
        """Those there are, those that are to be, and those that have drained lately."""
        awaited = [
            Member(name, role, host="", progress=self._waits.get(role, "starting"))
            for name, role in self._fleet.workers.items()
            if name not in self._census.names
        ]
        return [*self._census.now, *awaited, *self._drained]

    async def scale(self, *, prefill: int | None = None, decode: int | None = None) -> None:
        """So many workers of each role from now on, and as many as before where None is given:
        new ones start, and those that are too many drain. Returns when that is decided."""
        try:
            await self._change(lambda fleet: self._scaled(fleet, prefill, decode))
        except ray.exceptions.RayError as error:
            raise Unavailable(f"Ray's head cannot be reached: {error}") from error

    def _scaled(self, fleet: Fleet, prefill: int | None, decode: int | None) -> Fleet:
        now = fleet.wanted
        wanted = Pools(
            now.prefill if prefill is None else prefill, now.decode if decode is None else decode
        )
        for role in Role:
            # A pool may have lost its last worker to the other one, or to an operator.
            if wanted.of(role) != now.of(role) and not 1 <= wanted.of(role) <= MOST_WORKERS:
                raise InvalidRequest(
                    f"{wanted.of(role)} {role} workers cannot be: 1 to {MOST_WORKERS} can",
                    field=role.value,
                )
        changing = self._role_changes.names(fleet)
        if changing and now.beyond(wanted).total:
            names = ", ".join(sorted(changing))
            raise Unavailable(f"{names} may still change its role: nobody can be drained now")
        return fleet.scaled(wanted, self._spare())

    def permit_switch(self, name: str, role: Role) -> None:
        """Agrees that a worker changes its role, and counts it there from now on; raises when
        nobody of its old role would be left to serve."""
        if not self._has_learned:
            raise Unavailable("the controller has just started: try again in some seconds")
        # Decode workers read prompts themselves where no prefill worker is left.
        replaced = role is Role.DECODE and self._does_without_prefill
        if not replaced and not set(self.serving(other(role))) - {name}:
            raise RoleRefused(
                f"{name} is the last {other(role).value} worker that serves and is to stay one;"
                " without it no request could be served"
            )
        self._role_changes.begin(name, role)

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    @property
    def changing_roles(self) -> bool:
        return bool(self._role_changes.names(self._fleet))

    @property
    def expected(self) -> Pools:
        """Workers that serve or start, those that change their role where they are going."""
        return self._role_changes.counted(self._fleet)

    def serving(self, role: Role) -> list[str]:
        """Workers of a role that serve and are to stay in it, those that are missed least
        first."""
        fleet = self._fleet
        going = fleet.retiring | self._role_changes.names(fleet)
        return [
            name
            for name in self._spare()
            if fleet.workers[name] is role and name not in going and self._census.serves(name)
        ]

    @property
    def _has_learned(self) -> bool:
        """Whether every worker was heard of since the start, or has had the time to tell."""
        return self._learning.done() or self._census.names >= self._fleet.workers.keys()

    def _note_report(self, report: cluster_pb2.RouterReport) -> None:
        if self.planning:
            self.planning.report(report, time.monotonic())

    def _spare(self) -> list[str]:
        """Workers, those that are missed least first: they do not serve yet, have few requests,
        or are young."""

        def missed(name: str) -> tuple[bool, int, int]:
            census = self._census
            return census.serves(name), census.requests(name), -int(name.rpartition("-")[2])

        return sorted(self._fleet.workers, key=missed)

    async def _change(self, step: Callable[[Fleet], Fleet]) -> None:
        """Goes on when whoever asked for it waits no longer: what is saved is what is done."""
        await asyncio.shield(self._carry_out(step))

    async def _carry_out(self, step: Callable[[Fleet], Fleet]) -> None:
        async with self._changing:
            fleet = step(self._fleet)
            await asyncio.to_thread(store.save, fleet)
            self._fleet = fleet
        self._changed.set()

    async def _forget(self, name: str) -> None:
        """The worker is not to come back."""
        await self._change(functools.partial(Fleet.without, name=name))
        self._census.forget(name)
        self._deadlines.pop(name, None)

    async def _tend(self) -> None:
        """Has the actors be as the fleet says, for ever."""
        while True:
            self._changed.clear()
            try:
                await self._look()
            except ray.exceptions.RayError as error:
                log.warning("Ray's head cannot be reached: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_SECONDS):
                    await self._changed.wait()

    async def _look(self) -> None:
        there = set(await asyncio.to_thread(ray.util.list_named_actors))
        workers = {name for name in there if is_worker(name)}
        if self._is_untethered(there):
            await self._end(workers)
        await self._heed_members()
        for name in self._fleet.retiring:
            await self._retire(name, name in workers)
        for name in workers - self._fleet.workers.keys():
            await asyncio.to_thread(kill, name)
        for name, role in self._fleet.workers.items():
            if name not in workers:
                await asyncio.to_thread(self._actors.make, name, role)
        await self._explain_waits()

    async def _explain_waits(self) -> None:
        unheard = self._fleet.workers.keys() - self._census.names
        self._waits = {
            role: await asyncio.to_thread(self._actors.waits_for, role)
            for role in {self._fleet.workers[name] for name in unheard}
        }

    async def _heed_members(self) -> None:
        """Workers leave and change roles by themselves: the fleet follows."""
        for name, role in self._fleet.workers.items():
            member = self._census.find(name)
            if member and member.progress == DRAINED:
                await self._forget(name)
                self._drained.append(member)
            elif member and member.progress == DRAINING and name not in self._fleet.retiring:
                await self._change(functools.partial(Fleet.retired, name=name))
            elif member and member.role and member.role is not role:
                await self._change(functools.partial(Fleet.switched, name=name, role=member.role))

    async def _retire(self, name: str, there: bool) -> None:
        """Has a worker drain. One that holds nothing, or too long, is ended."""
        deadline = self._deadlines.setdefault(name, time.monotonic() + self._drain_seconds)
        unheard = name not in self._census.names and not self._learning.done()
        if there and (unheard or self._census.serves(name)) and time.monotonic() < deadline:
            await asyncio.to_thread(drain, name)
        else:
            await self._forget(name)

    def _is_untethered(self, there: set[str]) -> bool:
        missing = bool(self._tether) and self._tether not in there
        self._untethered = self._untethered + 1 if missing else 0
        return self._untethered >= TETHER_LOOKS

    async def _end(self, workers: set[str]) -> None:
        """Ends everything, this process last."""
        log.warning("whoever started this cluster is gone; it ends")
        for name in workers:
            await asyncio.to_thread(kill, name)
        await asyncio.to_thread(store.forget)
        await asyncio.to_thread(kill, CONTROLLER)

    async def _learn(self) -> None:
        await self._server.start()
        await asyncio.sleep(LEARNING_SECONDS)
        await self._publish()

    async def _publish(self) -> None:
        serving = [
            _message(item, item.role) for item in self._census.told if item.role and item.address
        ]
        members = cluster_pb2.Members(workers=serving, ended_agents=self._ended)
        await self._membership.publish(members)

    def _serve(self, address: str, identity: Identity | None) -> None:
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Routers ask whether we are there; most of the time there is nothing else to say.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ]
        self._server = grpc.aio.server(options=options)
        cluster_pb2_grpc.add_MembershipServicer_to_server(self._membership, self._server)
        cluster_pb2_grpc.add_ControlServicer_to_server(Control(self), self._server)
        listen(self._server, address, identity)


def _give_up(task: asyncio.Task[None]) -> None:
    """What was not foreseen ends the process; Ray starts another."""
    log.error("the pools can no longer be tended", exc_info=task.exception())
    os._exit(1)


def _stop_planning(task: asyncio.Task[None]) -> None:
    """What was not foreseen there leaves the pools as they are."""
    log.error("the planner has stopped", exc_info=task.exception())


def _message(member: Member, role: Role) -> cluster_pb2.Member:
    return cluster_pb2.Member(
        worker_id=member.worker_id, role=role_to(role), address=member.address
    )

"""The controller: a Ray actor that owns the pools and the membership. No request passes it.

    Fleet (the wanted workers) ─reconcile, once a second and after each change─▶ actors
    members ─update, once a second each─▶ addresses ─Membership.Watch─▶ routers

It outlives the command that made it, and Ray restarts it when it dies. The fleet is in Ray's
store; a restarted controller learns everything else from the members, which report once a second.
It listens on the same port, and publishes nothing until every expected worker has reported or
LEARNING_SECONDS have passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable

import grpc
import ray

from baton.cluster import ray_session
from baton.cluster.actors import SilentActors, WorkerActors, drain
from baton.cluster.fleet import CONTROLLER, DRAINING, EndedProcesses, Member, is_router, is_worker
from baton.cluster.fleet_manager import LEARNING_SECONDS, FleetManager
from baton.cluster.gpu_shares import gpus_of
from baton.cluster.model_table import ModelTable
from baton.cluster.planning import PlanRounds, run_planner
from baton.core import config as configs
from baton.core.errors import Unavailable
from baton.core.tls import Identity, node_identity
from baton.core.types import MAX_MESSAGE_BYTES, Role
from baton.core.wire import role_from, role_to
from baton.rpc import Context, listen, unary
from baton.v1 import cluster_pb2 as pb
from baton.v1 import cluster_pb2_grpc

log = logging.getLogger(__name__)

RECONCILE_SECONDS = 1.0

DRAIN_SECONDS = 15.0
"""Added to `drain_seconds`: a worker that has not drained by then is killed."""

TETHER_CHECKS = 3
"""Consecutive checks in which the tether must be missing to count as gone."""


class Controller:
    def __init__(
        self, address: str, tree: dict[str, object], gpus: float, *, joined: bool, tether: str
    ) -> None:
        """`address` is where to listen; ":PORT" means this node's address. `tree` is the
        cluster's configuration; `gpus` and `joined` are as for WorkerActors.

        `tether` is an actor that ends with the command that started the cluster; once it is
        gone, the cluster ends. Empty for a detached cluster.
        """
        config = configs.parse(tree)
        logging.basicConfig(level=config.log_level.upper())
        self._manager = FleetManager(config)
        self._models = ModelTable(config)
        self._unstarted = {  # models that never had workers
            name for name in self._models.served if not self._manager.fleet.of_model(name)
        }
        self._joined = joined
        self._drain_seconds = config.drain_seconds + DRAIN_SECONDS
        self._tether = tether
        self._untethered = 0  # consecutive checks that missed the tether
        self._deadlines: dict[str, float] = {}  # of draining workers
        self._ended = EndedProcesses()
        self._silent = SilentActors()
        self._gpus = gpus
        self._rounds: dict[str, PlanRounds] = {}
        self._planners: dict[str, asyncio.Task[None]] = {}
        self._membership = MembershipService(self._note_report)
        self._adapters = ray_session.load_adapters()
        control = ControlService(self, self._manager, self._models)
        self._serve(control, ray_session.complete(address), node_identity(config))
        self._learning = asyncio.ensure_future(self._learn())
        self._reconciling = asyncio.ensure_future(self._reconcile_always())
        self._reconciling.add_done_callback(_end_process)
        for model in self._models.served:
            self._start_planner(model)

    def _start_planner(self, model: str) -> None:
        """Starts a model's planner if its configuration enables one."""
        config = self._models.config(model)
        if config.planner.enabled:
            on_gpus = gpus_of(config, Role.DECODE, self._gpus) > 0
            rounds = self._rounds[model] = PlanRounds(config, gpus=on_gpus)
            planner = asyncio.ensure_future(run_planner(rounds, self._manager, model))
            planner.add_done_callback(_log_planner_end)
            self._planners[model] = planner

    def _note_report(self, report: pb.RouterReport) -> None:
        self._models.report(report)
        if rounds := self._rounds.get(report.model):
            rounds.report(report)

    def describe_plan(self, model: str) -> pb.PlanResponse:
        rounds = self._rounds.get(model)
        return rounds.describe() if rounds else pb.PlanResponse()

    async def add_model(self, named: pb.NamedModel) -> None:
        """Saves the name, then the wanted workers. The next reconciliation makes them."""
        await self._models.add(named)
        self._unstarted.add(named.name)
        self._start_planner(named.name)
        await self._start_workers()
        await self._publish()

    async def _start_workers(self) -> None:
        """Adds the workers of unstarted models to the fleet. Each reconciliation retries."""
        for name in self._unstarted & set(self._models.served):
            config = self._models.config(name)
            prefill, decode = config.prefill.workers, config.decode.workers
            await self._manager.scale(name, prefill=prefill, decode=decode)
            self._unstarted.discard(name)

    async def remove_model(self, name: str) -> None:
        await self._models.remove(name)
        self._rounds.pop(name, None)
        if planner := self._planners.pop(name, None):
            planner.cancel()
        await self._publish()

    async def _end_removed(self) -> None:
        """Drains the workers of idle removed models, and forgets models without workers."""
        for name in self._models.leaving:
            if self._manager.fleet.of_model(name):
                if self._models.is_idle(name):
                    await self._manager.retire_all(name)
                continue
            self._adapters = {
                key: named for key, named in self._adapters.items() if named.model != name
            }
            await asyncio.to_thread(ray_session.save_adapters, self._adapters)
            await self._models.forget(name)

    async def update(self, member: Member) -> None:
        """Takes a process's report on itself. A restarted process replaces its former one."""
        manager = self._manager
        if member.role and member.worker_id not in manager.fleet.workers:
            return  # it is about to be killed
        before = manager.members.report(member)
        if before:
            self._ended.note_report(before, member)
        self._ended.judge(member.verdicts)
        if member.progress == DRAINING:
            manager.changed.set()
        if manager.has_learned:
            await self._publish()

    async def members(self) -> list[Member]:
        return self._manager.all_members()

    async def _reconcile_always(self) -> None:
        changed = self._manager.changed
        while True:
            changed.clear()
            try:
                await self._reconcile()
            except (ray.exceptions.RayError, Unavailable) as error:
                log.warning("cannot reconcile the workers now: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECONCILE_SECONDS):
                    await changed.wait()

    async def _reconcile(self) -> None:
        """Makes, drains and kills actors until they match the fleet."""
        manager = self._manager
        there = set(await asyncio.to_thread(ray.util.list_named_actors))
        workers = {name for name in there if is_worker(name)}
        if self._is_untethered(there):
            await self._end_cluster(workers)
        if manager.is_past_learning:
            members = {name for name in there if is_worker(name) or is_router(name)}
            silent = set(filter(manager.members.is_silent, members))
            await asyncio.to_thread(self._silent.call, silent)
        await manager.follow_members()
        await self._start_workers()
        await self._end_removed()
        nodes = await asyncio.to_thread(ray.nodes)
        gone = {node["NodeID"] for node in nodes if not node["Alive"]}
        self._ended.note_lost_nodes(gone, manager.members.latest.values())
        latest = time.monotonic() + self._drain_seconds
        retiring = manager.fleet.retiring
        self._deadlines = {name: self._deadlines.get(name, latest) for name in retiring}
        for name in retiring:
            await self._retire(name, name in workers)
        for name in workers - manager.fleet.workers.keys():
            await asyncio.to_thread(ray_session.kill_actor, name)
        fleet = manager.fleet
        for name, role in fleet.workers.items():
            if name not in workers:
                await asyncio.to_thread(self._actors(fleet.models[name]).make, name, role)
        awaited = fleet.workers.keys() - manager.members.latest.keys()
        manager.waits = {
            (model, role): await asyncio.to_thread(self._actors(model).waits_for, role)
            for model, role in {(fleet.models[name], fleet.workers[name]) for name in awaited}
        }

    def _actors(self, model: str) -> WorkerActors:
        return WorkerActors(self._models.config(model), self._gpus, joined=self._joined)

    async def _retire(self, name: str, there: bool) -> None:
        """Drains a worker, or forgets it if it does not serve or takes too long."""
        manager = self._manager
        awaited = name not in manager.members.latest and not manager.is_past_learning
        in_time = time.monotonic() < self._deadlines[name]
        if there and (awaited or manager.members.serves(name)) and in_time:
            await asyncio.to_thread(drain, name)
        else:
            await manager.forget(name)

    def _is_untethered(self, there: set[str]) -> bool:
        missing = bool(self._tether) and self._tether not in there
        self._untethered = self._untethered + 1 if missing else 0
        return self._untethered >= TETHER_CHECKS

    async def _end_cluster(self, workers: set[str]) -> None:
        """Kills every actor, this one last."""
        log.warning("the command that started this cluster is gone; the cluster ends")
        for name in workers:
            await asyncio.to_thread(ray_session.kill_actor, name)
        await asyncio.to_thread(ray_session.clear_store)
        await asyncio.to_thread(ray_session.kill_actor, CONTROLLER)

    async def _learn(self) -> None:
        await self._server.start()
        await asyncio.sleep(LEARNING_SECONDS)
        await self._publish()

    async def _publish(self) -> None:
        serving = [
            pb.Member(
                worker_id=each.worker_id,
                role=role_to(each.role),
                address=each.address,
                model=self._manager.fleet.models.get(each.worker_id, ""),
            )
            for each in self._manager.members.latest.values()
            if each.role and each.address
        ]
        members = pb.Members(
            workers=serving,
            ended_agents=self._ended.agents,
            verdicts=self._ended.verdicts,
            adapters=self._adapters.values(),
            models=self._models.named,
        )
        await self._membership.publish(members)

    async def name_adapter(self, named: pb.NamedAdapter) -> None:
        """Saves the name before routers see it."""
        self._adapters[named.name] = named
        await asyncio.to_thread(ray_session.save_adapters, self._adapters)
        await self._publish()

    def _serve(self, control: ControlService, address: str, identity: Identity | None) -> None:
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Routers ping: most of the time nothing else is sent.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ]
        self._server = grpc.aio.server(options=options)
        cluster_pb2_grpc.add_MembershipServicer_to_server(self._membership, self._server)
        cluster_pb2_grpc.add_ControlServicer_to_server(control, self._server)
        listen(self._server, address, identity)


def _end_process(task: asyncio.Task[None]) -> None:
    """Ends this process after an unexpected error; Ray restarts it."""
    log.error("reconciling has failed", exc_info=task.exception())
    os._exit(1)


def _log_planner_end(task: asyncio.Task[None]) -> None:
    """Logs an unexpected error; the pools stay as they are."""
    if not task.cancelled():  # its model was removed
        log.error("the planner has stopped", exc_info=task.exception())


class MembershipService(cluster_pb2_grpc.MembershipServicer):
    """Streams the serving workers to routers once they are known, and receives their reports."""

    def __init__(self, on_report: Callable[[pb.RouterReport], None] = lambda report: None) -> None:
        self._on_report = on_report
        self._now: pb.Members | None = None
        self._changed = asyncio.Condition()

    async def publish(self, members: pb.Members) -> None:
        async with self._changed:
            self._now = members
            self._changed.notify_all()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Members]:
        sent = None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._now != sent)  # noqa: B023 run at once
                sent = self._now
            assert sent is not None
            yield sent

    async def Report(self, request: pb.RouterReport, context: Context) -> pb.ReportResponse:
        self._on_report(request)
        return pb.ReportResponse()


class ControlService(cluster_pb2_grpc.ControlServicer):
    """Serves operators' calls, which routers forward."""

    def __init__(self, controller: Controller, manager: FleetManager, models: ModelTable) -> None:
        self._controller = controller
        self._manager = manager
        self._models = models

    @unary
    async def Scale(self, message: pb.ScaleRequest) -> pb.PoolsResponse:
        await self._manager.scale(
            self._models.check(message.model),
            prefill=message.prefill if message.HasField("prefill") else None,
            decode=message.decode if message.HasField("decode") else None,
        )
        return self._pools()

    @unary
    async def Pools(self, message: pb.PoolsRequest) -> pb.PoolsResponse:
        return self._pools()

    @unary
    async def Plan(self, message: pb.PlanRequest) -> pb.PlanResponse:
        return self._controller.describe_plan(self._models.check(message.model))

    @unary
    async def PermitSwitch(self, message: pb.SwitchRoleRequest) -> pb.PermitSwitchResponse:
        self._manager.permit_switch(message.worker_id, role_from(message.role))
        return pb.PermitSwitchResponse()

    @unary
    async def NameAdapter(self, message: pb.NamedAdapter) -> pb.NameAdapterResponse:
        await self._controller.name_adapter(message)
        return pb.NameAdapterResponse()

    @unary
    async def Models(self, message: pb.ModelsRequest) -> pb.ModelsResponse:
        return pb.ModelsResponse(models=self._models.named)

    @unary
    async def AddModel(self, message: pb.NamedModel) -> pb.AddModelResponse:
        await self._controller.add_model(message)
        return pb.AddModelResponse()

    @unary
    async def RemoveModel(self, message: pb.RemoveModelRequest) -> pb.RemoveModelResponse:
        await self._controller.remove_model(message.name)
        return pb.RemoveModelResponse()

    def _pools(self) -> pb.PoolsResponse:
        fleet = self._manager.fleet
        members = {member.worker_id: member for member in self._manager.all_members()}
        return pb.PoolsResponse(
            prefill=fleet.wanted.prefill,
            decode=fleet.wanted.decode,
            workers=[
                pb.PooledWorker(
                    worker_id=name,
                    role=role_to(role),
                    progress=members[name].progress,
                    ready=bool(members[name].address) and name not in fleet.retiring,
                    retiring=name in fleet.retiring,
                    error=members[name].error,
                    model=fleet.models[name],
                )
                for name, role in fleet.workers.items()
            ],
            models=[
                pb.ModelPools(
                    model=name,
                    prefill=fleet.wanted_of(name).prefill,
                    decode=fleet.wanted_of(name).decode,
                    removed=name in self._models.leaving,
                )
                for name in (*self._models.served, *self._models.leaving)
            ],
        )

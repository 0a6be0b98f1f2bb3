"""A router's calls to the controller: follows the membership, reports traffic, changes pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from baton.core.errors import (
    BatonError,
    Internal,
    InvalidRequest,
    NotServed,
    RoleRefused,
    Unavailable,
    WorkerLost,
)
from baton.core.tls import Identity
from baton.core.types import Adapter, Role
from baton.core.wire import adapter_from, adapter_to, is_role, role_from
from baton.router.served_models import ServedModel, ServedModels
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership
from baton.rpc import open_channel
from baton.v1 import cluster_pb2 as pb
from baton.v1 import cluster_pb2_grpc

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
REPORT_CALL_SECONDS = 5.0
REPORT_SECONDS = 1.0
RETRY_SECONDS = 0.5

Message = TypeVar("Message")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ControllerClient:
    address: str  # empty if the router follows no controller
    identity: Identity | None

    async def follow(self, apply: Callable[[pb.Members], None]) -> None:
        """Applies the controller's membership, now and after each change, until cancelled.

        While the controller cannot be reached, the membership stays as it is: serving does not
        depend on the controller.
        """
        logged: str | None = None  # logged once per outage, which may last for hours
        async with open_channel(self.address, self.identity) as channel:
            stub = cluster_pb2_grpc.MembershipStub(channel)
            while True:
                try:
                    async for members in stub.Watch(pb.WatchRequest()):
                        logged = None
                        apply(members)
                except grpc.aio.AioRpcError as error:
                    if logged != error.details():
                        logged = error.details()
                        log.warning(
                            "the controller at %s cannot be reached: %s", self.address, logged
                        )
                await asyncio.sleep(RETRY_SECONDS)

    async def report(self, router_id: str, models: Callable[[], Iterable[ServedModel]]) -> None:
        """Reports traffic and load to the controller's planner once a second, until cancelled.
        A report that fails is dropped."""
        async with open_channel(self.address, self.identity) as channel:
            stub = cluster_pb2_grpc.MembershipStub(channel)
            while True:
                await asyncio.sleep(REPORT_SECONDS)
                for model in models():
                    try:
                        message = _report(router_id, model)
                        await stub.Report(message, timeout=REPORT_CALL_SECONDS)
                    except grpc.aio.AioRpcError:
                        # Dropped too: later, the traffic of an outage would look like a burst.
                        model.serving.demand.drain()

    async def scale(self, request: pb.ScaleRequest) -> pb.PoolsResponse:
        return await self._call(lambda control: control.Scale, request)

    async def pools(self) -> pb.PoolsResponse:
        return await self._call(lambda control: control.Pools, pb.PoolsRequest())

    async def plan(self, request: pb.PlanRequest) -> pb.PlanResponse:
        return await self._call(lambda control: control.Plan, request)

    async def models(self) -> list[pb.NamedModel] | None:
        """Returns the models to serve; None if no controller answers."""
        if not self.address:
            return None
        try:
            found = await self._call(lambda control: control.Models, pb.ModelsRequest())
        except BatonError as error:  # it is away, or of a version with one model
            log.warning("serving the models of the configuration: %s", error.message)
            return None
        return list(found.models)

    async def add_model(self, request: pb.NamedModel) -> pb.AddModelResponse:
        return await self._call(lambda control: control.AddModel, request)

    async def remove_model(self, request: pb.RemoveModelRequest) -> pb.RemoveModelResponse:
        return await self._call(lambda control: control.RemoveModel, request)

    async def switch_role(
        self, models: ServedModels, message: pb.SwitchRoleRequest
    ) -> pb.SwitchRoleResponse:
        """Switches a worker's role unless it is the last of its pool. Returns once it has switched.

        A controller, if there is one, must permit it, since it sees the requests of all routers.
        """
        if not is_role(message.role):
            raise InvalidRequest("the role must be prefill or decode", field="role")
        role = role_from(message.role)
        model, link = models.worker(message.worker_id)
        membership = model.membership
        _check_switch(membership, link, role)
        if self.address:
            await self._call(lambda control: control.PermitSwitch, message)
            # Checked again: meanwhile another switch may have begun, or the worker been lost.
            _check_switch(membership, link, role)
        switched = await link.switch(role)
        if switched.error or link.role is not role:
            why = switched.error or "another role switch came first"
            raise Unavailable(f"{link.worker_id} keeps its role: {why}")
        return pb.SwitchRoleResponse(
            drain_seconds=switched.drain_seconds, switch_seconds=switched.switch_seconds
        )

    async def add_adapter(
        self, models: ServedModels, name: str, folder: str, base: str = ""
    ) -> Adapter:
        """Loads an adapter on every worker, then serves it in all routers. An empty `base` selects
        the only model."""
        model = models.named(base)
        adapters = model.serving.adapters
        adapter = await adapters.find(name, folder)
        models.check_free(name, but=model)
        await model.serving.dispatcher.try_adapter(adapter)
        await self._name_adapter(model, name, adapter)
        adapters.serve(name, adapter)
        return adapter

    async def remove_adapter(self, models: ServedModels, name: str) -> None:
        """Removes an adapter's name from all routers, then waits for this router's requests."""
        model = models.of_adapter(name)
        adapters = model.serving.adapters
        adapter = adapters.served[name]
        await self._name_adapter(model, name, None)
        adapters.serve(name, None)
        await adapters.wait_idle(name, adapter)

    async def _name_adapter(self, model: ServedModel, name: str, adapter: Adapter | None) -> None:
        if self.address:
            held = adapter_to(adapter) if adapter else None
            named = pb.NamedAdapter(name=name, adapter=held, model=model.name)
            await self._call(lambda control: control.NameAdapter, named)

    async def _call(
        self,
        method: Callable[
            [cluster_pb2_grpc.ControlAsyncStub],
            grpc.aio.UnaryUnaryMultiCallable[Message, Answer],
        ],
        request: Message,
    ) -> Answer:
        """Makes a call on its own connection, since operators' calls are rare. Waits for a
        controller that is being restarted."""
        if not self.address:
            raise NotServed(
                "this router has no controller that starts and ends workers: do it by hand, or"
                " start the cluster with `baton serve`"
            )
        try:
            async with open_channel(self.address, self.identity) as channel:
                call = method(cluster_pb2_grpc.ControlStub(channel))
                return await call(request, timeout=CALL_SECONDS, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            kind, text = _ERRORS.get(error.code(), (Internal, "the controller failed: {}"))
            raise kind(text.format(error.details() or error.code().name)) from error


_ERRORS: dict[grpc.StatusCode, tuple[type[BatonError], str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequest, "{}"),
    grpc.StatusCode.FAILED_PRECONDITION: (RoleRefused, "{}"),
    grpc.StatusCode.UNAVAILABLE: (
        Unavailable,
        "the controller cannot do it now, try again: {}",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        Unavailable,
        f"the controller has not answered for {CALL_SECONDS:g} s: it, or Ray's head, is away."
        " Requests are served without it; the call may still take effect",
    ),
}


def _check_switch(membership: Membership, link: WorkerLink, role: Role) -> None:
    """Raises if the switch would change nothing or leave requests unserved."""
    if link.role is None:
        raise WorkerLost(f"worker {link.worker_id} was lost")
    if link.role is role:
        raise RoleRefused(f"{link.worker_id} is a {role.value} worker already")
    if link.draining:
        raise Unavailable(f"{link.worker_id} is already being drained or switching its role")
    others = any(other is not link for other in membership.usable(link.role))
    replaced = link.role is Role.PREFILL and membership.allows_local_prefill
    if not others and not replaced:
        raise RoleRefused(
            f"{link.worker_id} is the last {link.role.value} worker that can be used; without it"
            " no request could be served"
        )


NO_CONTROLLER = ControllerClient("", None)


def apply_members(members: pb.Members, model: ServedModel) -> None:
    """Applies the controller's membership to one model."""
    membership = model.membership
    # Controllers of earlier versions, with one model, send no names.
    names = ("", model.name)
    own = [worker.address for worker in members.workers if worker.model in names]
    membership.set_addresses(own)
    membership.note_ended(members.ended_agents)
    membership.note_verdicts(members.verdicts)
    for named in members.adapters:
        if named.model in names:
            adapter = adapter_from(named.adapter) if named.HasField("adapter") else None
            model.serving.adapters.serve(named.name, adapter)


def _report(router_id: str, model: ServedModel) -> pb.RouterReport:
    serving, membership = model.serving, model.membership
    report, costs = serving.demand.drain(), serving.placer.costs.costs
    prefill, decode = list(membership.usable(Role.PREFILL)), list(membership.usable(Role.DECODE))
    report.router_id, report.model = router_id, model.name
    report.active_requests = serving.active
    report.step_costs.extend(costs.step)
    report.queued_seconds = costs.prefill.wait(sum(link.prompts.queued_tokens for link in prefill))
    report.queued_requests = serving.admission.queued
    report.waiting = sum(link.load.waiting for link in decode)
    report.decode_pages = min((link.total_pages for link in decode), default=0)
    return report

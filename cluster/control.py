"""What routers pass on of their operators' calls, over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.cluster.member import Member
from baton.cluster.planning import Planned
from baton.core.types import Role
from baton.core.wire import role_from, role_to
from baton.rpc.statuses import unary
from baton.v1 import cluster_pb2 as pb
from baton.v1 import cluster_pb2_grpc

if TYPE_CHECKING:
    from baton.cluster.controller import Controller


class Control(cluster_pb2_grpc.ControlServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @unary
    async def Scale(self, message: pb.ScaleRequest) -> pb.PoolsResponse:
        await self._controller.scale(
            prefill=message.prefill if message.HasField("prefill") else None,
            decode=message.decode if message.HasField("decode") else None,
        )
        return await self._pools()

    @unary
    async def Pools(self, message: pb.PoolsRequest) -> pb.PoolsResponse:
        return await self._pools()

    @unary
    async def Plan(self, message: pb.PlanRequest) -> pb.PlanResponse:
        planning = self._controller.planning
        if planning is None:
            return pb.PlanResponse()
        return pb.PlanResponse(
            enabled=True,
            acts=planning.acts,
            ttft=planning.goals.ttft,
            itl=planning.goals.itl,
            most_workers=planning.goals.most_workers,
            least_prefill=planning.goals.least.prefill,
            least_decode=planning.goals.least.decode,
            last=_round(planning.last) if planning.last else None,
            changes=map(_round, reversed(planning.changes)),
        )

    @unary
    async def PermitSwitch(self, message: pb.SwitchRoleRequest) -> pb.PermitSwitchResponse:
        self._controller.permit_switch(message.worker_id, role_from(message.role))
        return pb.PermitSwitchResponse()

    async def _pools(self) -> pb.PoolsResponse:
        fleet = self._controller.fleet
        heard = {member.worker_id: member for member in await self._controller.members()}
        return pb.PoolsResponse(
            prefill=fleet.wanted.prefill,
            decode=fleet.wanted.decode,
            workers=[
                _worker(heard[name], role, name in fleet.retiring)
                for name, role in fleet.workers.items()
            ],
        )


def _round(planned: Planned) -> pb.PlannedRound:
    decision = planned.decision
    return pb.PlannedRound(
        at=planned.at,
        words=decision.summary,
        reasons=decision.reasons,
        have_prefill=decision.have.prefill,
        have_decode=decision.have.decode,
        need_prefill=decision.need.prefill,
        need_decode=decision.need.decode,
    )


def _worker(member: Member, role: Role, retiring: bool) -> pb.PooledWorker:
    return pb.PooledWorker(
        worker_id=member.worker_id,
        role=role_to(role),
        progress=member.progress,
        ready=bool(member.address) and not retiring,
        retiring=retiring,
        error=member.error,
    )

"""Has a worker change its role, if its pool can do without it."""

from __future__ import annotations

from baton.core.errors import InvalidRequest, RoleRefused, Unavailable, WorkerLost
from baton.core.types import Role
from baton.core.wire import is_role, role_from
from baton.router.workers.control import ControllerCalls
from baton.router.workers.link import WorkerLink
from baton.router.workers.roster import Roster
from baton.v1 import cluster_pb2


async def switch_role(
    roster: Roster, controller: ControllerCalls, message: cluster_pb2.SwitchRoleRequest
) -> cluster_pb2.SwitchRoleResponse:
    """Returns when the worker has taken up its new role; raises why it has not.

    The controller, where there is one, has to agree: it knows what other routers are asked.
    """
    if not is_role(message.role):
        raise InvalidRequest("the role must be prefill or decode", field="role")
    role = role_from(message.role)
    link = roster.named(message.worker_id)
    _check(roster, link, role)
    await controller.permit_switch(message)
    # Another change, or its loss, may have come first.
    _check(roster, link, role)
    switched = await link.switch(role)
    if switched.error or link.role is not role:
        why = switched.error or "another change of its role came first"
        raise Unavailable(f"{link.worker_id} goes on as it was: {why}")
    return cluster_pb2.SwitchRoleResponse(
        drain_seconds=switched.drain_seconds, switch_seconds=switched.switch_seconds
    )


def _check(roster: Roster, link: WorkerLink, role: Role) -> None:
    """Raises when the change is no change, or would leave requests without anybody."""
    if link.role is None:
        raise WorkerLost(f"worker {link.worker_id} was lost")
    if link.role is role:
        raise RoleRefused(f"{link.worker_id} is a {role.value} worker already")
    if link.draining:
        raise Unavailable(f"{link.worker_id} is being drained, or changes its role already")
    others = any(other is not link for other in roster.usable(link.role))
    # Decode workers read prompts themselves where no prefill worker is left.
    replaced = link.role is Role.PREFILL and roster.does_without_prefill
    if not others and not replaced:
        raise RoleRefused(
            f"{link.worker_id} is the last {link.role.value} worker that can be used; without it"
            " no request could be served"
        )

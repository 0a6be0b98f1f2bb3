"""Passing on to the controller what only it can do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from baton.core.errors import (
    BatonError,
    Internal,
    InvalidRequest,
    NotServed,
    RoleRefused,
    Unavailable,
)
from baton.core.tls import Identity
from baton.router.workers.channels import open_channel
from baton.v1 import cluster_pb2 as pb
from baton.v1 import cluster_pb2_grpc

CALL_SECONDS = 10.0


class ControllerCalls:
    """Calls come from people and are rare: each has a connection of its own, and waits for a
    controller that is just being started again."""

    def __init__(self, address: str, identity: Identity | None) -> None:
        self._address = address
        self._identity = identity

    async def scale(self, request: pb.ScaleRequest) -> pb.PoolsResponse:
        async with self._controller() as controller:
            return await controller.Scale(request, timeout=CALL_SECONDS, wait_for_ready=True)

    async def pools(self) -> pb.PoolsResponse:
        async with self._controller() as controller:
            return await controller.Pools(
                pb.PoolsRequest(), timeout=CALL_SECONDS, wait_for_ready=True
            )

    async def plan(self) -> pb.PlanResponse:
        async with self._controller() as controller:
            return await controller.Plan(
                pb.PlanRequest(), timeout=CALL_SECONDS, wait_for_ready=True
            )

    async def permit_switch(self, request: pb.SwitchRoleRequest) -> None:
        """Raises when the controller does not agree to a change of roles. A router that follows
        none decides by itself."""
        if self._address:
            async with self._controller() as controller:
                await controller.PermitSwitch(request, timeout=CALL_SECONDS, wait_for_ready=True)

    @asynccontextmanager
    async def _controller(self) -> AsyncIterator[cluster_pb2_grpc.ControlAsyncStub]:
        if not self._address:
            raise NotServed(
                "this router follows no controller, which could start and end workers: do it by"
                " hand, or start the cluster with `baton serve`"
            )
        try:
            async with open_channel(self._address, self._identity) as channel:
                yield cluster_pb2_grpc.ControlStub(channel)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error


def _translated(error: grpc.aio.AioRpcError) -> BatonError:
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(details)
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"the controller cannot do it now, try again: {details}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(
                f"the controller has not answered for {CALL_SECONDS:g} s: it, or Ray's head, is"
                " away. Requests are served without it; what was asked may still be done"
            )
        case grpc.StatusCode.FAILED_PRECONDITION:
            return RoleRefused(details)
    return Internal(f"the controller failed: {details}")

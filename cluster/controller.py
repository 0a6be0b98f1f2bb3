"""The controller: knows the members and tells the routers. On no request's path.

It keeps nothing that it could not learn again: every member tells about itself
once a second. A controller that Ray has started again listens on the same port,
and tells the routers nothing before it has heard from everyone it expects, or
has waited long enough for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any

import grpc
import ray

from baton.v1 import cluster_pb2, cluster_pb2_grpc
from core import config as configs
from core.tls import Identity, node_identity
from core.types import MAX_MESSAGE_BYTES, Role
from core.wire import role_to

CONTROLLER = "controller"
"""The controller's name in the cluster's Ray namespace."""

DRAINED = "drained"
"""The progress of a worker that has ended because it was told to, and is not to come back."""

REMEMBERED = 256
"""Ended processes that routers are told of."""

LEARNING_SECONDS = 5.0
"""How long a controller that has just started waits for members it expects."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster, as far as it has come."""

    worker_id: str
    # None for a router.
    role: Role | None
    # Where it listens; empty means at its node's address.
    host: str
    progress: str = "starting"
    # "host:port" once it serves.
    address: str = ""
    # For a router, where it speaks HTTP, if it does, and where its metrics are.
    http: str = ""
    metrics: str = ""
    # Why it cannot start, when it cannot.
    error: str = ""
    # Its process: another one after a restart.
    pid: int = 0
    # The transport agent of a worker that serves: another one after a restart too.
    agent: str = ""


class Controller:
    """A Ray actor. Its methods carry control, never tokens or pages."""

    def __init__(self, address: str, expected: Collection[str], tree: dict[str, object]) -> None:
        """`tree` is the cluster's configuration."""
        self._expected = frozenset(expected)
        self._members: dict[str, Member] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)  # their transport agents
        self._membership = Membership()
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Routers ask whether we are there; most of the time there is nothing else to say.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ]
        self._server = grpc.aio.server(options=options)
        cluster_pb2_grpc.add_MembershipServicer_to_server(self._membership, self._server)
        self._bind(address, node_identity(configs.parse(tree)))
        self._learning = asyncio.ensure_future(self._learn())

    def _bind(self, address: str, identity: Identity | None) -> None:
        if identity is None:
            self._server.add_insecure_port(address)
            return
        credentials = grpc.ssl_server_credentials(
            [(identity.key, identity.certificate)], identity.authority, require_client_auth=True
        )
        self._server.add_secure_port(address, credentials)

    async def update(self, member: Member) -> None:
        """A process tells how far it is. A restarted one replaces its earlier self."""
        before = self._members.get(member.worker_id)
        self._members[member.worker_id] = member
        if before and before.agent not in ("", member.agent):
            self._ended.append(before.agent)
        if member.progress == DRAINED:
            # Ray would otherwise start it again.
            ray.kill(ray.get_actor(member.worker_id), no_restart=True)
        if self._learning.done() or self._members.keys() >= self._expected:
            await self._publish()

    async def members(self) -> list[Member]:
        return list(self._members.values())

    async def _learn(self) -> None:
        await self._server.start()
        await asyncio.sleep(LEARNING_SECONDS)
        await self._publish()

    async def _publish(self) -> None:
        serving = [
            _message(item, item.role)
            for item in self._members.values()
            if item.role and item.address
        ]
        members = cluster_pb2.Members(workers=serving, ended_agents=self._ended)
        await self._membership.publish(members)


def _message(member: Member, role: Role) -> cluster_pb2.Member:
    return cluster_pb2.Member(
        worker_id=member.worker_id, role=role_to(role), address=member.address
    )


class Membership(cluster_pb2_grpc.MembershipServicer):
    """The list of workers that serve, told to any number of routers once it is known."""

    def __init__(self) -> None:
        self._now: cluster_pb2.Members | None = None
        self._changed = asyncio.Condition()

    async def publish(self, members: cluster_pb2.Members) -> None:
        async with self._changed:
            self._now = members
            self._changed.notify_all()

    async def Watch(
        self, request: cluster_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[cluster_pb2.Members]:
        told = None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._now != told)  # noqa: B023 read at once
                told = self._now
            assert told is not None
            yield told

"""Learning the members from the controller, over gRPC."""

from __future__ import annotations

import asyncio
import logging

import grpc

from baton.core.tls import Identity
from baton.router.workers.channels import open_channel
from baton.router.workers.roster import Roster
from baton.v1 import cluster_pb2, cluster_pb2_grpc

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5


async def follow(controller: str, roster: Roster, identity: Identity | None) -> None:
    """Keeps the roster as the controller says, until cancelled.

    While the controller cannot be reached the roster stays as it is: serving
    does not depend on it.
    """
    said: str | None = None  # once an outage: it may last for hours
    async with open_channel(controller, identity) as channel:
        stub = cluster_pb2_grpc.MembershipStub(channel)
        while True:
            try:
                async for members in stub.Watch(cluster_pb2.WatchRequest()):
                    said = None
                    roster.set_addresses(member.address for member in members.workers)
                    roster.note_ended(members.ended_agents)
            except grpc.aio.AioRpcError as error:
                if said != error.details():
                    said = error.details()
                    log.warning("the controller at %s cannot be reached: %s", controller, said)
            await asyncio.sleep(RETRY_SECONDS)

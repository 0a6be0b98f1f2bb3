"""Tells the controller, for its planner, what is asked of this router and how busy workers are."""

from __future__ import annotations

import asyncio

import grpc

from baton.core.tls import Identity
from baton.core.types import Role
from baton.router.requests.serving import Serving
from baton.router.workers.channels import open_channel
from baton.router.workers.roster import Roster
from baton.v1 import cluster_pb2, cluster_pb2_grpc

REPORT_SECONDS = 1.0
CALL_SECONDS = 5.0


async def report(
    controller: str, router_id: str, serving: Serving, roster: Roster, identity: Identity | None
) -> None:
    """Once a second, until cancelled. What cannot be told is lost: the planner goes by rates of
    what it has heard, and nothing else depends on it."""
    async with open_channel(controller, identity) as channel:
        stub = cluster_pb2_grpc.MembershipStub(channel)
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            try:
                await stub.Report(_report(router_id, serving, roster), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError:
                serving.demand.take()


def _report(router_id: str, serving: Serving, roster: Roster) -> cluster_pb2.RouterReport:
    counts, costs = serving.demand.take(), roster.costs.costs
    prefill, decode = list(roster.usable(Role.PREFILL)), list(roster.usable(Role.DECODE))
    pending = sum(link.prompts.queued_tokens for link in prefill)
    return cluster_pb2.RouterReport(
        router_id=router_id,
        arrivals=counts.arrivals,
        prompt_seconds=counts.prompt_seconds,
        overhead_seconds=counts.overhead_seconds,
        answers=counts.answers,
        answer_tokens=counts.answer_tokens,
        page_tokens=counts.page_tokens,
        step_costs=costs.step,
        queued_seconds=costs.wait_seconds(pending),
        queued_requests=serving.admission.queued,
        waiting=sum(link.load.waiting for link in decode),
        decode_pages=min((link.total_pages for link in decode), default=0),
    )

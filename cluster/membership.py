"""Tells routers which workers there are, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from baton.v1 import cluster_pb2, cluster_pb2_grpc


class Membership(cluster_pb2_grpc.MembershipServicer):
    """The list of workers that serve, told to any number of routers once it is known."""

    def __init__(
        self, on_report: Callable[[cluster_pb2.RouterReport], None] = lambda report: None
    ) -> None:
        """`on_report` is called with what routers report."""
        self._on_report = on_report
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

    async def Report(
        self, request: cluster_pb2.RouterReport, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.ReportResponse:
        self._on_report(request)
        return cluster_pb2.ReportResponse()

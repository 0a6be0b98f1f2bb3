"""Idle load: many streams that stay open, and many connections that open and close."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2

WATCH = "/grpc.health.v1.Health/Watch"

STREAMS_EACH = 1000
"""Idle streams per gRPC connection."""

OPENING = 200
"""Idle streams that are opened concurrently."""


@contextlib.asynccontextmanager
async def idle_streams(address: str, count: int) -> AsyncIterator[int]:
    """Opens streams that get one message and then stay idle while the block runs. Yields their
    number. They watch the router's health, which does not change."""
    # Otherwise channels to one address share a connection.
    apart = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(address, options=apart) for _ in range(-(-count // STREAMS_EACH))
    ]
    opening = asyncio.Semaphore(OPENING)

    async def open_one(channel: grpc.aio.Channel) -> grpc.aio.Call:
        async with opening:
            watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(WATCH)
            call = watch(health_pb2.HealthCheckRequest().SerializeToString())
            await call.read()
            return call

    numbers = range(count)
    calls = await asyncio.gather(*(open_one(channels[n // STREAMS_EACH]) for n in numbers))
    try:
        yield sum(not call.done() for call in calls)
    finally:
        for call in calls:
            call.cancel()
        for channel in channels:
            await channel.close()


@dataclass(slots=True)
class Connections:
    """Counts of connections so far."""

    opened: int = 0
    failed: int = 0


async def keep_connecting(address: str, rate: float, made: Connections) -> None:
    """Opens `rate` connections per second and closes each at once, until cancelled."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    while True:
        due = int((time.monotonic() - began) * rate)
        for _ in range(due - made.opened - made.failed):
            with socket.socket() as connection:
                connection.setblocking(False)
                try:
                    await loop.sock_connect(connection, (host, int(port)))
                    made.opened += 1
                except OSError:
                    made.failed += 1
        await asyncio.sleep(0.005)

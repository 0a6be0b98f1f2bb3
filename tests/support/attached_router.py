"""One more router of a cluster's workers, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from processes import ProcessCluster

from baton.core import config as configs
from baton.core.process import StopSignal
from baton.router.server import RouterServer


@asynccontextmanager
async def attached_router(
    cluster: ProcessCluster, tree: dict[str, object]
) -> AsyncIterator[RouterServer]:
    """`tree` is its configuration, beside ports and workers."""
    workers = [cluster.worker_address(name) for name in cluster.workers]
    ports = {"port": 0, "http_port": 0, "metrics_port": 0, "canary_seconds": 0}
    server = RouterServer(configs.parse({"router": ports, "members": {"workers": workers}, **tree}))
    stopping = StopSignal()
    await server.start()
    await server.wait_ready()
    serving = asyncio.ensure_future(server.serve_until(stopping))
    yield server
    stopping.request()
    stopping.request()
    await serving

"""One more router of a cluster's workers, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from front_door import running_router
from processes import ProcessCluster

from baton.core import config as configs
from baton.router.server import RouterServer


@asynccontextmanager
async def attached_router(
    cluster: ProcessCluster, tree: dict[str, object]
) -> AsyncIterator[RouterServer]:
    """`tree` is its configuration, beside ports and workers."""
    workers = [cluster.worker_address(name) for name in cluster.workers]
    ports = {"port": 0, "http_port": 0, "metrics_port": 0, "canary_seconds": 0}
    config = configs.parse({"router": ports, "members": {"workers": workers}, **tree})
    async with running_router(config) as server:
        yield server

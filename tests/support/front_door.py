"""A real router in this process, in front of workers that answer at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from bench.instant_worker import InstantWorker, Pace
from core import config as configs
from core import model_store
from core.process import Stopping
from core.tls import node_identity
from core.types import Role
from router.server import RouterServer

LETTER = 81
"""A token of the embedded model's that is one letter."""


@asynccontextmanager
async def front_door(
    tree: dict[str, object] | None = None, *, step_seconds: float = 0.0, **settings: object
) -> AsyncIterator[RouterServer]:
    """`settings` are the router's, and `tree` what else a configuration may hold."""
    pace = Pace(LETTER, step_seconds)
    pace.go.set()
    workers = [
        InstantWorker(role, f"{role.value}-0", model_store.EMBEDDED_NAME, pace) for role in Role
    ]
    router = {"port": 0, "http_port": 0, "metrics_port": 0, "canary_seconds": 0, **settings}
    credentials = _credentials(configs.parse(tree or {}))
    addresses = [await worker.start(credentials) for worker in workers]
    config = configs.parse({**(tree or {}), "members": {"workers": addresses}, "router": router})
    server = RouterServer(config)
    stopping = Stopping()
    try:
        await server.start()
        await server.wait_ready()
        serving = asyncio.ensure_future(server.serve_until(stopping))
        yield server
        stopping.ask()
        stopping.ask()
        await serving
    finally:
        for worker in workers:
            await worker.stop()


def _credentials(config: configs.Config) -> grpc.ServerCredentials | None:
    """As real workers have them."""
    identity = node_identity(config)
    if identity is None:
        return None
    return grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)], identity.authority, require_client_auth=True
    )

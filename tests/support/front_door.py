"""A real router in this process, in front of workers that answer at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

from baton.core import config as configs
from baton.core import model_store
from baton.core.process import StopSignal
from baton.core.tls import node_identity
from baton.core.types import Role
from baton.router.prompts.text import Text
from baton.router.server import RouterServer
from bench.instant_worker import InstantWorker, Pace

LETTER = 81
"""A token of the embedded model's that is one letter."""


@asynccontextmanager
async def front_door(
    tree: dict[str, object] | None = None, *, step_seconds: float = 0.0, **settings: object
) -> AsyncIterator[RouterServer]:
    """`settings` are the router's section, `tree` the rest of the configuration."""
    pace = Pace(LETTER, step_seconds)
    pace.go.set()
    workers = [
        InstantWorker(role, f"{role.value}-0", model_store.EMBEDDED_NAME, pace) for role in Role
    ]
    router = {"port": 0, "http_port": 0, "metrics_port": 0, "canary_seconds": 0, **settings}
    identity = node_identity(configs.parse(tree or {}))
    addresses = [await worker.start(identity) for worker in workers]
    config = configs.parse({**(tree or {}), "members": {"workers": addresses}, "router": router})
    try:
        async with running_router(config) as server:
            yield server
    finally:
        for worker in workers:
            await worker.stop()


@asynccontextmanager
async def running_router(config: configs.Config) -> AsyncIterator[RouterServer]:
    """In this process, with workers ready; ended at once, without waiting for requests."""
    server, stopping = RouterServer(config), StopSignal()
    with patch.object(Text, "load", _load_text):
        await server.start()
    await server.wait_ready()
    serving = asyncio.ensure_future(server.serve_until(stopping))
    yield server
    stopping.request()
    stopping.request()
    await serving


_load = Text.load
_load_embedded = cache(_load)


def _load_text(folder: Path, *formats: str) -> Text:
    """The embedded model's tokenizer takes a fifth of a second to read."""
    known = folder == model_store.embedded_folder()
    return _load_embedded(folder, *formats) if known else _load(folder, *formats)


@contextmanager
def front_door_beside(tree: dict[str, object] | None = None) -> Iterator[RouterServer]:
    """The same on its own thread, for tests without asyncio."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    door = front_door(tree)
    try:
        yield asyncio.run_coroutine_threadsafe(door.__aenter__(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(door.__aexit__(None, None, None), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

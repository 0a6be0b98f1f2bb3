"""A scripted router, and clients that talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from scripted_router import ScriptedRouter

from baton import AsyncClient, Client


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    scripted = ScriptedRouter()
    yield scripted
    scripted.stop()


@pytest.fixture
def client(router: ScriptedRouter) -> Iterator[Client]:
    with Client(router.address) as connected:
        yield connected


@pytest.fixture
async def async_client(router: ScriptedRouter) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(router.address) as connected:
        yield connected

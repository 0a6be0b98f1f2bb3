"""A scripted router with clients and terminals; a Redis; a clock; the rendered overlays; quicker
interpreted kernels."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clocks import Clock
from command_line import Terminal
from kustomize import OVERLAYS, Manifest, render
from scripted_router import ScriptedRouter

from baton import AsyncClient, Client
from bench.redis_server import RedisServer

if TYPE_CHECKING:
    import torch  # which a process that only distributes the tests need not wait for


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


@pytest.fixture
def terminal(router: ScriptedRouter, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    router.hang = True
    opened = Terminal(*request.param, "--address", router.address)
    yield opened
    opened.close()


@pytest.fixture
def closed_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=sorted(path.name for path in OVERLAYS.iterdir()))
def overlay(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(OVERLAYS / request.param)


@pytest.fixture
def few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are interpreted."""
    from gpu_ranks import FEW_PROGRAMS

    if device.type == "cpu":
        for module, name, value in FEW_PROGRAMS:
            monkeypatch.setattr(module, name, value)

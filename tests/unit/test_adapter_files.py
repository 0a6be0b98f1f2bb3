"""Files of an adapter that one worker sends to another, over real connections."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from adapters import save_adapter
from tiny_models import TINY_MODELS, save

from baton.core import adapter_store
from baton.core.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from baton.core.adapter_store import copy_folder, digest_of, find_adapter, locate_files
from baton.core.errors import AdapterMissing
from baton.core.types import Adapter
from baton.rpc import Context, listen
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker import adapter_files
from baton.worker.adapter_files import AdapterFilesService, fetch_adapter


class Bad(worker_pb2_grpc.AdapterFilesServicer):
    """Sends these parts, then ends the call as a lost worker does."""

    def __init__(self, parts: Sequence[pb.AdapterPart], *, lost: bool = False) -> None:
        self._parts = parts
        self._lost = lost

    async def Read(self, request: pb.Adapter, context: Context) -> AsyncIterator[pb.AdapterPart]:
        for part in self._parts:
            yield part
        if self._lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@asynccontextmanager
async def serving(*services: worker_pb2_grpc.AdapterFilesServicer) -> AsyncIterator[list[str]]:
    """The addresses of workers with these services."""
    servers, addresses = [], []
    for service in services:
        server = grpc.aio.server()
        worker_pb2_grpc.add_AdapterFilesServicer_to_server(service, server)
        addresses.append(f"127.0.0.1:{listen(server, '127.0.0.1:0', None)}")
        await server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "adapters"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = save(TINY_MODELS["llama"], tmp_path / "model")
    save_adapter(base, tmp_path / "lora")
    return tmp_path / "lora"


async def fetch(adapter: Adapter, *sources: str) -> None:
    await asyncio.to_thread(fetch_adapter, adapter._replace(sources=sources), None)


async def test_the_files_arrive_whole(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "PART_BYTES", 1000)
    adapter = find_adapter(str(folder))
    async with serving(AdapterFilesService([str(folder)])) as sources:
        await fetch(adapter, *sources)
    assert locate_files(adapter) == cache / adapter.digest.hex()
    assert digest_of(locate_files(adapter)) == adapter.digest
    assert os.listdir(cache) == [adapter.digest.hex()]


async def test_a_worker_sends_what_it_has_fetched(folder: Path) -> None:
    adapter = find_adapter(str(folder))
    copy_folder(adapter.digest).parent.mkdir(parents=True)
    shutil.move(folder, copy_folder(adapter.digest))
    async with serving(AdapterFilesService([str(folder)])) as sources:
        await fetch(adapter, *sources)  # a second fetch finds the copy there, and leaves it
    assert digest_of(locate_files(adapter)) == adapter.digest


async def test_the_next_worker_is_asked_when_one_fails(folder: Path, tmp_path: Path) -> None:
    adapter = find_adapter(str(folder))
    config, weights = (folder / name for name in (CONFIG_FILE, WEIGHTS_FILE))
    part = pb.AdapterPart(file=WEIGHTS_FILE, content=weights.read_bytes()[:100])
    other = pb.AdapterPart(file=CONFIG_FILE, content=config.read_bytes())
    async with serving(
        Bad([part], lost=True),
        Bad([other, part]),  # other weights
        Bad([pb.AdapterPart(file="../escaped", content=b"x")]),
        Bad([]),
        AdapterFilesService([str(tmp_path / "elsewhere")]),  # not allowed there
        AdapterFilesService([str(folder)]),
    ) as sources:
        with pytest.raises(AdapterMissing) as failed:
            await fetch(adapter, *sources[:5], "127.0.0.1:1")
        for reason in ("Socket closed", "digest", "escaped", "has no", "not below", "connect"):
            assert reason in failed.value.message, failed.value.message
        assert os.listdir(copy_folder(adapter.digest).parent) == []
        await fetch(adapter, *sources)
    assert digest_of(locate_files(adapter)) == adapter.digest


async def test_a_worker_without_the_files_says_so(folder: Path) -> None:
    adapter = find_adapter(str(folder))
    shutil.rmtree(folder)
    async with serving(AdapterFilesService([str(folder)])) as sources:
        with pytest.raises(AdapterMissing, match=r"no other worker has sent it: .*is not here"):
            await fetch(adapter, *sources)


def test_the_oldest_copies_are_dropped(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_store, "KEPT_COPIES", 2)
    cache.mkdir(parents=True)
    for seconds, name in enumerate(("a" * 32, "b" * 32, "other")):
        (cache / name).mkdir()
        os.utime(cache / name, (seconds, seconds))
    adapter = find_adapter(str(folder))
    adapter_store.keep_copy(adapter, folder)
    assert set(os.listdir(cache)) == {adapter.digest.hex(), "b" * 32, "other"}

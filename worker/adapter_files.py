"""Copies an adapter's files from a worker whose node has them to one whose node lacks them.

    a router names workers ─▶ asked one after another ─▶ all files, with the right digest ─▶ kept
                                        └─ refused, lost or other files: the next one

A worker sends files from the adapter's location or from its own fetched copy. It need not have
loaded the adapter.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import grpc

from baton.core.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from baton.core.adapter_store import check_location, copy_folder, keep_copy, locate_files
from baton.core.errors import AdapterMissing, BatonError
from baton.core.tls import Identity
from baton.core.types import Adapter
from baton.core.wire import adapter_from, adapter_to
from baton.rpc import Context, abort, open_blocking_channel
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

FILES = (CONFIG_FILE, WEIGHTS_FILE)
PART_BYTES = 1 << 20
FETCH_SECONDS = 300.0
"""Limit for one worker to send all files; a lost or frozen worker is noticed sooner."""


def fetch_adapter(adapter: Adapter, identity: Identity | None) -> None:
    """Copies the adapter's files from the first of its sources that has them. Blocks. Raises
    AdapterMissing if none has them."""
    problems = []
    for source in adapter.sources:
        try:
            _fetch(adapter, source, identity)
        except grpc.RpcError as error:
            problems.append(_describe(error))
        except (BatonError, OSError) as error:
            problems.append(str(error))
        else:
            log.info("adapter %s was fetched from %s", adapter.digest.hex(), source)
            return
        log.warning("cannot fetch adapter %s from %s: %s", adapter.folder, source, problems[-1])
    raise AdapterMissing(
        f"{adapter.folder} is not on this node, and no other worker has sent it:"
        f" {'; '.join(dict.fromkeys(problems))}"
    )


def _describe(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)  # as every error that a call raises
    return error.details() or error.code().name


def _fetch(adapter: Adapter, source: str, identity: Identity | None) -> None:
    folder = copy_folder(adapter.digest).parent
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as temporary,
        open_blocking_channel(source, identity) as channel,
    ):
        stub = worker_pb2_grpc.AdapterFilesStub(channel)
        files = Path(temporary) / "files"
        files.mkdir()
        _write(files, stub.Read(adapter_to(adapter), timeout=FETCH_SECONDS))
        keep_copy(adapter, files)


def _write(folder: Path, parts: Iterator[pb.AdapterPart]) -> None:
    for part in parts:
        if part.file not in FILES:
            raise AdapterMissing(f"{part.file!r} is not a file of an adapter")
        with (folder / part.file).open("ab") as file:
            file.write(part.content)


class AdapterFilesService(worker_pb2_grpc.AdapterFilesServicer):
    """Sends the files of adapters in allowed locations."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = tuple(allowed)

    async def Read(self, request: pb.Adapter, context: Context) -> AsyncIterator[pb.AdapterPart]:
        adapter = adapter_from(request)
        try:
            check_location(adapter.folder, self._allowed)
            async for part in _read(adapter):
                yield part
        except BatonError as error:
            await abort(context, error)


async def _read(adapter: Adapter) -> AsyncIterator[pb.AdapterPart]:
    folder = await asyncio.to_thread(locate_files, adapter)
    for name in FILES:
        try:
            file = (folder / name).open("rb")
        except OSError as error:
            raise AdapterMissing(f"{name} is not here: {error.strerror}") from error
        with file:
            while content := await asyncio.to_thread(file.read, PART_BYTES):
                yield pb.AdapterPart(file=name, content=content)

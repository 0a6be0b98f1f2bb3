"""Clients that read many answers at once, over gRPC or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub

CHANNELS = 8
_TEXTS = re.compile(rb'"text":"([^"]*)"')


@dataclass(slots=True)
class Arrivals:
    """When each token of a stream came, and in how many messages."""

    times: list[float] = field(default_factory=list)
    messages: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, tokens: int) -> None:
        if tokens:
            self.times += [time.monotonic()] * tokens
            self.messages += 1
            self.begun.set()


class Clients(Protocol):
    async def read(self, stream: int, tokens: int, arrivals: Arrivals) -> None:
        """Reads one stream of so many tokens."""

    async def close(self) -> None: ...


class GrpcClients:
    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)
        ]
        self._stubs = [InferenceStub(channel) for channel in self._channels]

    async def read(self, stream: int, tokens: int, arrivals: Arrivals) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[stream] * 16), max_tokens=tokens, ignore_eos=True
        )
        call = self._stubs[stream % CHANNELS].Generate(request)
        while isinstance(response := await call.read(), pb.GenerateResponse):
            arrivals.note(len(response.delta.token_ids))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class HttpClients:
    """One connection a stream, read without more work than counting the answer's letters."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def read(self, stream: int, tokens: int, arrivals: Arrivals) -> None:
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(
            lambda: _Events(arrivals), self._host, self._port
        )
        transport.write(_request(stream, tokens))
        await reader.ended
        transport.close()

    async def close(self) -> None:
        pass


class _Events(asyncio.Protocol):
    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """What is cut in the middle of an event waits for the rest."""
        whole, cut, self._rest = (self._rest + data).rpartition(b"\n\n")
        for text in _TEXTS.findall(whole):
            self._arrivals.note(len(text))
        if (cut and whole.endswith(b"[DONE]")) or whole.startswith(b"HTTP/1.1 4"):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _request(stream: int, tokens: int) -> bytes:
    body = json.dumps(
        {"prompt": [stream] * 16, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    )
    head = [
        "POST /v1/completions HTTP/1.1",
        "host: bench",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*head, "", body]).encode()

"""Streamed calls to a server of the OpenAI API, with their times, in closed or open loop."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton.cli.load_test import Load
from baton.connection import TLS_VARIABLE
from baton.core.errors import BatonError, Unavailable
from baton.core.tls import CA, CLIENT, certificate_path, key_path

TIMEOUT_SECONDS = 600.0


@dataclass(slots=True)
class Call:
    """A call's result. Times are seconds after its start."""

    began: float  # after the start of the run
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between deltas of the answer
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean time per token after the first."""
        return (self.seconds - self.ttft) / max(self.output_tokens - 1, 1)


Ended = Callable[[Call], None]
"""Called with each call that has ended."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the options of its requests."""

    url: str
    model: str
    api_key: str = ""
    ignore_eos: bool = True

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.url,
            headers=_headers(self.api_key),
            timeout=TIMEOUT_SECONDS,
            limits=limits,
            verify=_trusted(self.url),
        )

    def body(self, load: Load) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": load.prompt}],
            "max_tokens": load.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {**body, "ignore_eos": True} if self.ignore_eos else body


def base_url(url: str) -> str:
    """Accepts a URL with or without /v1."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/"


def served_model(url: str, api_key: str) -> str:
    """The server's first model."""
    try:
        response = httpx.get(
            f"{url}models", headers=_headers(api_key), timeout=10.0, verify=_trusted(url)
        )
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise BatonError(f"{url}models answers {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"no server answers at {url}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BatonError(f"{url}models has no OpenAI API; give a --model") from error


def _headers(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _trusted(url: str) -> ssl.SSLContext | bool:
    """The system's authorities and, if BATON_TLS names a folder, the cluster's."""
    folder = os.environ.get(TLS_VARIABLE, "")
    if not folder or not url.startswith("https:"):
        return True
    context = ssl.create_default_context()
    context.load_verify_locations(certificate_path(Path(folder), CA))
    if (own := certificate_path(Path(folder), CLIENT)).exists():
        context.load_cert_chain(own, key_path(Path(folder), CLIENT))
    return context


async def call_server(client: httpx.AsyncClient, target: Target, load: Load, began: float) -> Call:
    """Sends one request and receives its answer. A failure is the call's `error`."""
    call = Call(began)
    start = time.perf_counter()
    try:
        async with client.stream("POST", "chat/completions", json=target.body(load)) as response:
            if response.is_error:
                await response.aread()
                call.error = _problem(response)
            else:
                await _receive(call, response, start)
    except httpx.HTTPError as error:
        call.error = type(error).__name__
    call.seconds = time.perf_counter() - start
    if not call.error and not call.ttft:
        call.error = "no tokens received"
    return call


async def _receive(call: Call, response: httpx.Response, start: float) -> None:
    last = 0.0
    deltas = 0
    async for event in _events(response):
        if "error" in event:
            call.error = str(event["error"])
            return
        if _has_text(event):
            now = time.perf_counter()
            if deltas:
                call.gaps.append(now - last)
            else:
                call.ttft = now - start
            last = now
            deltas += 1
        usage = event.get("usage")
        if isinstance(usage, dict):
            call.prompt_tokens = usage["prompt_tokens"]
            call.output_tokens = usage["completion_tokens"]
    # A server that counts no tokens sends one in each delta.
    call.output_tokens = call.output_tokens or deltas


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, object]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _has_text(event: dict[str, object]) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    delta = choices[0].get("delta") or {}
    return bool(delta.get("content") or delta.get("reasoning_content"))


def _problem(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return str(response.status_code)


async def closed_loop(
    target: Target, loads: Sequence[Load], concurrency: int, ended: Ended
) -> list[Call]:
    """Keeps `concurrency` requests running until all are answered."""
    waiting = iter(loads)
    calls: list[Call] = []
    start = time.perf_counter()

    async def user(client: httpx.AsyncClient) -> None:
        for load in waiting:
            call = await call_server(client, target, load, time.perf_counter() - start)
            calls.append(call)
            ended(call)

    async with target.client() as client:
        await asyncio.gather(*(user(client) for _ in range(min(concurrency, len(loads)))))
    return calls


async def open_loop(target: Target, loads: Sequence[Load], ended: Ended) -> list[Call]:
    """Sends each at its time, however many are running."""
    start = time.perf_counter()

    async def send(client: httpx.AsyncClient, load: Load) -> Call:
        await asyncio.sleep(load.at_seconds - (time.perf_counter() - start))
        call = await call_server(client, target, load, load.at_seconds)
        ended(call)
        return call

    async with target.client() as client:
        return list(await asyncio.gather(*(send(client, load) for load in loads)))

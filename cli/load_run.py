"""A load test: streamed calls to a server of the OpenAI API, and the report of their times."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.text import Text

from baton.cli.load_test import Load
from baton.cli.terminal import grid
from baton.cli.views import time_text
from baton.connection import TLS_VARIABLE
from baton.core.errors import BatonError, InvalidConfig, InvalidRequest, Unavailable
from baton.core.metrics import PERCENTILES, Spread
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


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the options of its requests."""

    url: str
    model: str
    api_key: str = ""
    ignore_eos: bool = True

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        settings = access(self.url, self.api_key)
        return httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits, **settings)

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
    """Returns the URL of the API. Accepts one with or without /v1."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is not a URL; write http://{url.partition('://')[2] or url}")
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/"


def served_model(url: str, api_key: str) -> str:
    """The server's first model."""
    try:
        with httpx.Client(timeout=10.0, **access(url, api_key)) as client:
            response = client.get("models").raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise BatonError(f"{url}models answers {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"no server answers at {url}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BatonError(f"{url}models has no OpenAI API; give a --model") from error


def access(url: str, api_key: str) -> dict[str, Any]:
    """An httpx client's settings. If BATON_TLS names a folder, it trusts that cluster too."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    trusted: ssl.SSLContext | bool = True
    if (folder := os.environ.get(TLS_VARIABLE, "")) and url.startswith("https:"):
        trusted = ssl.create_default_context()
        trusted.load_verify_locations(certificate_path(Path(folder), CA))
        if (own := certificate_path(Path(folder), CLIENT)).exists():
            trusted.load_cert_chain(own, key_path(Path(folder), CLIENT))
    return {"base_url": url, "headers": headers, "verify": trusted}


async def run(
    target: Target, loads: Sequence[Load], concurrency: int, ended: Callable[[Call], None]
) -> None:
    """Sends each load at its time, at most `concurrency` at once. `ended` gets each result."""
    start = time.perf_counter()
    free = asyncio.Semaphore(concurrency)

    async def send(client: httpx.AsyncClient, load: Load) -> None:
        await asyncio.sleep(load.at_seconds - (time.perf_counter() - start))
        async with free:
            call = Call(began=time.perf_counter() - start)
            await _complete(call, client, target.body(load))
        ended(call)

    async with target.client() as client:
        await asyncio.gather(*(send(client, load) for load in loads))


async def _complete(call: Call, client: httpx.AsyncClient, body: dict[str, object]) -> None:
    """Sends one request and receives its answer. A failure is the call's `error`."""
    start = time.perf_counter()
    try:
        async with client.stream("POST", "chat/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                call.error = _error_text(response)
            else:
                await _receive(call, response, start)
    except httpx.HTTPError as error:
        call.error = type(error).__name__
    call.seconds = time.perf_counter() - start
    if not call.error and not call.ttft:
        call.error = "no tokens received"


async def _receive(call: Call, response: httpx.Response, start: float) -> None:
    times: list[float] = []
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            call.error = str(event["error"])
            return
        if _has_text(event):
            times.append(time.perf_counter() - start)
        if isinstance(usage := event.get("usage"), dict):
            call.prompt_tokens = usage["prompt_tokens"]
            call.output_tokens = usage["completion_tokens"]
    call.ttft = times[0] if times else 0.0
    call.gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Without a count from the server, assume one token per delta.
    call.output_tokens = call.output_tokens or len(times)


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    delta = choices[0].get("delta") or {}
    return bool(delta.get("content") or delta.get("reasoning_content"))


def _error_text(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return str(response.status_code)


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits of a good answer; 0 sets none."""

    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0

    def met(self, call: Call) -> bool:
        ttft, tpot = self.ttft_seconds, self.tpot_seconds
        return (
            not call.error and (not ttft or call.ttft <= ttft) and (not tpot or call.tpot <= tpot)
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    good: int
    goodput_per_second: float

    @classmethod
    def of(cls, calls: Sequence[Call], objective: Objective) -> LoadReport:
        done = [call for call in calls if not call.error]
        seconds = max((call.began + call.seconds for call in calls), default=0.0)
        scale = 1 / seconds if seconds else 0.0
        output = sum(call.output_tokens for call in done)
        good = sum(objective.met(call) for call in calls)
        return cls(
            requests=len(calls),
            failed=len(calls) - len(done),
            errors=dict(Counter(call.error for call in calls if call.error).most_common(5)),
            seconds=seconds,
            requests_per_second=len(done) * scale,
            prompt_tokens=sum(call.prompt_tokens for call in done),
            output_tokens=output,
            output_tokens_per_second=output * scale,
            ttft=Spread.of([call.ttft for call in done]),
            itl=Spread.of([gap for call in done for gap in call.gaps]),
            tpot=Spread.of([call.tpot for call in done if call.output_tokens > 1]),
            e2e=Spread.of([call.seconds for call in done]),
            good=good,
            goodput_per_second=good * scale,
        )


def render(report: LoadReport, objective: Objective) -> RenderableType:
    table = grid("", right=("mean", *(f"p{percent}" for percent in PERCENTILES)), gap=3)
    rows = {
        "time to first token": report.ttft,
        "between deltas (ITL)": report.itl,
        "per token (TPOT)": report.tpot,
        "end to end": report.e2e,
    }
    for name, spread in rows.items():
        values = (spread.mean, spread.p50, spread.p90, spread.p99)
        table.add_row(name, *(time_text(value) for value in values))
    headline = (
        f"{report.requests - report.failed} of {report.requests} answered in"
        f" {report.seconds:.1f} s: {report.requests_per_second:.2f} requests a second,"
        f" {report.output_tokens_per_second:,.1f} tokens a second"
        f" ({report.prompt_tokens:,} prompt tokens, {report.output_tokens:,} generated)"
    )
    errors = (Text(f"{count} x {error}", style="red") for error, count in report.errors.items())
    return Group(Text(headline, style="bold"), "", table, "", *_goodput(report, objective), *errors)


def _goodput(report: LoadReport, objective: Objective) -> list[Text]:
    limits = {"TTFT": objective.ttft_seconds, "TPOT": objective.tpot_seconds}
    wanted = ", ".join(f"{name} ≤ {time_text(limit)}" for name, limit in limits.items() if limit)
    share = report.good / max(report.requests, 1)
    text = (
        f"goodput ({wanted}): {report.goodput_per_second:.2f} requests a second, {share:.0%} of all"
    )
    return [Text(text)] if wanted else []


def check_plot(path: Path) -> None:
    """Raises InvalidConfig if no plot could be drawn at `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfig("a plot needs matplotlib: install baton-llm[plot]")
    if not path.parent.is_dir():
        raise InvalidConfig(f"there is no folder {path.parent} for the plot")


def plot(calls: Sequence[Call], path: Path) -> None:
    """Draws the distributions of times, and TTFT and TPOT over the run."""
    from matplotlib.figure import Figure

    done = [call for call in calls if not call.error]
    figure = Figure(figsize=(11, 4), layout="constrained")
    spread, course = figure.subplots(1, 2)
    curves = {
        "TTFT": [call.ttft for call in done],
        "ITL": [gap for call in done for gap in call.gaps],
        "end to end": [call.seconds for call in done],
    }
    for name, values in curves.items():
        spread.ecdf(values or [0.0], label=name)
    spread.set(xscale="log", xlabel="seconds", ylabel="share of requests", title="How long it took")
    spread.legend()
    course.scatter([call.began for call in done], [call.ttft for call in done], s=12, label="TTFT")
    course.scatter([call.began for call in done], [call.tpot for call in done], s=12, label="TPOT")
    course.set(yscale="log", xlabel="seconds into the run", ylabel="seconds", title="When")
    course.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot draw {path}: {error}") from error

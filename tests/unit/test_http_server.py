"""The HTTP server in front of scripted answers."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import sys
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import MagicMock

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry
from waiting import until

import baton
from baton.core.api_keys import make_key, write_keys
from baton.core.config import Config, RouterConfig, TlsConfig
from baton.core.errors import Exhausted, Internal, SlowReader, Unavailable
from baton.core.types import Request
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent, Emit
from baton.router.edges import http as http_edge
from baton.router.edges.auth import KeyRing
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.http_app import HttpApp
from baton.router.edges.http.http_server import BoundedConnection, HttpServer
from baton.router.followed_models import FollowedModels
from baton.router.observe.ledger import RequestLedger
from baton.router.observe.overview import RouterOverview
from baton.router.requests.adapter_names import AdapterNames
from baton.router.requests.answering import gather_all
from baton.router.requests.serving import Activity, Serving
from baton.router.served_models import ServedModel, ServedModels
from baton.router.server import RouterServer
from baton.router.workers.membership import Membership
from baton.v1 import inference_pb2 as pb

STARTED = pb.Started(request_id="id", prompt_tokens=3)
FINISHED = pb.Finished(finish_reason=pb.FINISH_REASON_STOP)
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
STREAM = {**CHAT, "stream": True}


class ScriptedServing:
    """Answers every request with `events`; an error among them is raised. Where `endless`, text
    follows for as long as somebody reads."""

    def __init__(
        self, *events: AnswerEvent | Exception, endless: bool = False, pause: float = 0.0
    ) -> None:
        self.activity = Activity(RouterConfig())
        self.active = 0
        self.context = 64
        self.ended_by: list[str] = []
        self.adapters = AdapterNames("tiny")
        self.embedding_model = None
        self.placer = SimpleNamespace(can_place=False)
        self._events = events
        self._endless = endless
        self._pause = pause

    async def generate_all(
        self, requests: Sequence[Request], ledger: RequestLedger, emit: Emit
    ) -> None:
        await gather_all([self._generate(emit) for _ in requests])

    async def _generate(self, emit: Emit) -> None:
        self.active += 1
        try:
            for event in self._events:
                if isinstance(event, Exception):
                    raise event
                emit(event)
            while self._endless:
                await asyncio.sleep(self._pause)
                emit(AnswerDelta("x" * 1000, [1]))
        except BaseException as error:
            self.ended_by.append(type(error).__name__)
            raise
        finally:
            self.active -= 1


@asynccontextmanager
async def served(
    serving: ScriptedServing, reader_buffer: int = 100, keys: str = "", origins: Sequence[str] = ()
) -> AsyncIterator[str]:
    """The address of a server in front of `serving`, which asks for the keys in a file."""
    membership = cast(
        Membership, SimpleNamespace(context_length=lambda: serving.context, faults=lambda role: [])
    )
    models = ServedModels()
    models.add(ServedModel("tiny", cast(Serving, serving), membership))
    context = EdgeContext(models, serving.activity, KeyRing(keys), reader_buffer)
    overview = cast(RouterOverview, MagicMock())
    followed = cast(FollowedModels, MagicMock())
    app = HttpApp(context, overview, CollectorRegistry(), followed, cors_origins=origins)
    server = HttpServer(app.app, context.end_calls, TlsConfig())
    address = server.start("127.0.0.1", 0)
    try:
        yield address
    finally:
        await server.stop(0.5)


@asynccontextmanager
async def client_of(
    serving: ScriptedServing, keys: str = "", origins: Sequence[str] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        served(serving, keys=keys, origins=origins) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as client,
    ):
        yield client


def events_of(text: str) -> list[str]:
    return text.removesuffix("\n\n").split("\n\n")


async def test_a_stream_is_made_of_server_sent_events() -> None:
    async with client_of(ScriptedServing(STARTED, AnswerDelta("é", [1]), FINISHED)) as client:
        response = await client.post("/v1/chat/completions", json=STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, last, done = events_of(response.text)
    chunk = json.loads(first.removeprefix("data: "))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": "é"}
    assert chunk["id"] == response.headers["x-request-id"]
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
    assert done == "data: [DONE]"


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_an_error_before_the_first_token_has_a_status(body: dict[str, object]) -> None:
    refused = Exhausted("full", retry_after=3.0)
    async with client_of(ScriptedServing(STARTED, refused)) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


async def test_the_page_loads_only_files_of_its_own_which_exist() -> None:
    async with client_of(ScriptedServing()) as client:
        page = await client.get("/")
        again = await client.get("/", headers={"if-none-match": page.headers["etag"]})
        named = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        files = [await client.get(f"/{name}") for name in named]
        missing = await client.get("/page/..%2fapp.py")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert {file.status_code for file in files} == {200}
    assert {file.headers["content-security-policy"] for file in files} == {policy}
    assert (again.status_code, missing.status_code) == (304, 404)
    assert not re.search(r"<script>|<style|style=|onclick|https?://", page.text)


def test_every_file_that_a_script_of_the_page_imports_is_installed() -> None:
    folder = Path(http_edge.__file__).with_name("page")
    for script in folder.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', script.read_text()):
            assert (folder / name).is_file()
    package_data = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "page/*" in package_data["tool"]["setuptools"]["package-data"]["baton.router.edges.http"]


async def test_the_page_needs_no_key_and_its_data_does(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    write_keys(file, [make_key("somebody")[1]])
    async with client_of(ScriptedServing(), str(file)) as client:
        statuses = [
            (await client.get(path)).status_code for path in ("/", "/page/main.js", "/v1/cluster")
        ]
    assert statuses == [200, 200, 401]


async def test_the_version_is_that_of_the_package() -> None:
    async with client_of(ScriptedServing()) as client:
        version = (await client.get("/version")).json()
        document = (await client.get("/openapi.json")).json()
    assert version == {"version": baton.__version__}
    assert document["info"]["version"] == baton.__version__


SITE = "https://chat.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def test_a_page_of_an_allowed_origin_can_stream(tmp_path: Path) -> None:
    key, entry = make_key("page")
    write_keys(tmp_path / "keys", [entry])
    serving = ScriptedServing(STARTED, AnswerDelta("hi", [1]), FINISHED)
    async with client_of(serving, str(tmp_path / "keys"), [SITE]) as client:
        asked = await client.options("/v1/chat/completions", headers={"origin": SITE, **PREFLIGHT})
        headers = {"origin": SITE, "authorization": f"Bearer {key}"}
        answer = await client.post("/v1/chat/completions", json=STREAM, headers=headers)
        refused = await client.get("/v1/models", headers={"origin": SITE})
        other = await client.options(
            "/v1/chat/completions", headers={"origin": "https://other.example", **PREFLIGHT}
        )
    assert asked.status_code == 200
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert (answer.status_code, refused.status_code) == (200, 401)
    assert answer.text.endswith("data: [DONE]\n\n")
    for each in (asked, answer, refused):
        assert each.headers["access-control-allow-origin"] == SITE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in other.headers


async def test_no_origin_is_allowed_by_default() -> None:
    async with client_of(ScriptedServing()) as client:
        asked = await client.options("/v1/chat/completions", headers={"origin": SITE, **PREFLIGHT})
        answer = await client.get("/v1/models", headers={"origin": SITE})
    assert asked.status_code == 405
    assert not [name for name in (*asked.headers, *answer.headers) if "access-control" in name]


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/chat/completions", 405, '"/v1/chat/completions" takes POST requests, not GET'),
        ("POST", "/v1/responses/resp_1", 405, "requests, not POST"),
        ("GET", "/v1/responses/x?stream=true", 400, "stream is not served"),
        ("GET", f"/v1/requests?limit=1{'0' * 5000}", 400, "limit must be 1 to 1000"),
        ("GET", f"/v1/requests?limit={'0' * 5000}1", 400, "limit must be 1 to 1000"),
    ],
)
async def test_a_wrong_call_is_answered_with_what_is_right(
    method: str, path: str, status: int, words: str
) -> None:
    async with client_of(ScriptedServing()) as client:
        refused = await client.request(method, path)
    assert refused.status_code == status
    assert words in refused.json()["error"]["message"]


async def test_a_slash_after_the_models_names_no_model() -> None:
    async with client_of(ScriptedServing()) as client:
        assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()


async def test_a_model_without_workers_states_no_context() -> None:
    serving = ScriptedServing()
    serving.context = 0
    async with client_of(serving) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["max_model_len"] is None


async def test_an_error_in_a_stream_is_an_event_that_ends_it() -> None:
    async with client_of(ScriptedServing(STARTED, AnswerDelta("a", [1]), Internal("x"))) as client:
        response = await client.post("/v1/chat/completions", json=STREAM)
    assert response.status_code == 200
    name, _, data = events_of(response.text)[-1].partition("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "server_error"


async def test_the_sdk_raises_an_error_in_a_stream() -> None:
    lost = Unavailable("no decode worker is ready")
    async with (
        served(ScriptedServing(STARTED, AnswerDelta("a", [1]), lost)) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none") as client,
    ):
        stream = await client.chat.completions.create(**STREAM, model="tiny")  # type: ignore[call-overload]
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="no decode worker is ready"):
            await anext(stream)


async def test_an_unexpected_error_is_returned_without_its_message() -> None:
    async with client_of(ScriptedServing(STARTED, RuntimeError("/secret"))) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert "secret" not in response.text


async def ended(serving: ScriptedServing) -> bool:
    return bool(serving.ended_by) and not serving.active


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_client_that_disconnects_cancels_its_request(body: dict[str, object]) -> None:
    serving = ScriptedServing(STARTED, AnswerDelta("a", [1]), endless=True)
    async with served(serving, reader_buffer=10**9) as address:
        _, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(raw(body))
        await until(lambda: running(serving))
        writer.close()
        await until(lambda: ended(serving))
    assert serving.ended_by == ["CancelledError"]


async def running(serving: ScriptedServing) -> bool:
    return serving.active == 1


def raw(body: dict[str, object]) -> bytes:
    content = json.dumps(body)
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(content)}",
    ]
    return "\r\n".join([*head, "", content]).encode()


async def test_a_connection_that_ends_is_freed_at_once() -> None:
    """Not by the garbage collector, which would stop the router to free thousands."""
    async with served(ScriptedServing()) as address:
        gc.collect()
        gc.disable()
        try:
            _, writer = await asyncio.open_connection(*address.split(":"))
            await until(lambda: has_connections(1))
            writer.close()
            await until(lambda: has_connections(0))
        finally:
            gc.enable()


async def has_connections(count: int) -> bool:
    return sum(isinstance(each, BoundedConnection) for each in gc.get_objects()) == count


async def test_a_client_that_stops_reading_gets_slow_reader_when_it_reads_again() -> None:
    serving = ScriptedServing(STARTED, endless=True)
    async with served(serving) as address:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            host, port = address.split(":")
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, raw(STREAM))
            await until(lambda: ended(serving))
            assert serving.ended_by == [SlowReader.__name__]
            received = b""
            while b"event: error" not in received[-2000:]:
                received += await loop.sock_recv(connection, 65536)
    assert len(received) < 2**20


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_call_in_progress_fails_when_the_router_stops(body: dict[str, object]) -> None:
    serving = ScriptedServing(STARTED, AnswerDelta("a", [1]), endless=True, pause=0.01)
    async with httpx.AsyncClient() as client:
        async with served(serving, reader_buffer=10**9) as address:
            url = f"http://{address}/v1/chat/completions"
            call = asyncio.create_task(client.post(url, json=body))
            await until(lambda: running(serving))
        assert "this router is stopping" in (await call).text
    assert not serving.active


@pytest.mark.parametrize("draining", [False, True])
async def test_a_router_without_workers_is_healthy_and_not_ready(draining: bool) -> None:
    serving = ScriptedServing()
    serving.activity.draining = draining
    async with client_of(serving) as client:
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
    assert ready.status_code == 503
    assert ("about to stop" in ready.text) is draining


def test_a_router_without_starlette_logs_it_and_serves_grpc(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    for name in [
        name for name in sys.modules if name.startswith(("starlette.", "baton.router.edges.http."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    server = RouterServer(Config())
    assert server._serve_http() is None
    assert server.http_address == ""
    assert caplog.messages == ["starlette is not installed: gRPC is served, HTTP is not"]


def test_a_router_that_may_open_too_few_files_says_so(caplog: pytest.LogCaptureFixture) -> None:
    RouterServer(Config())._check_open_files(1024)
    RouterServer(Config())._check_open_files(4096)
    (warning,) = caplog.messages
    assert warning.startswith("only 1024 files may be open (ulimit -n): ")


async def test_a_key_may_come_in_a_header_of_its_own(tmp_path: Path) -> None:
    secret, entry = make_key("somebody")
    write_keys(tmp_path / "keys", [entry])
    body = {**CHAT, "max_tokens": 5}
    serving = ScriptedServing(STARTED, AnswerDelta("a", [1]), FINISHED)
    async with client_of(serving, str(tmp_path / "keys")) as client:
        known = await client.post("/v1/messages", json=body, headers={"x-api-key": secret})
        unknown = await client.post("/v1/messages", json=body, headers={"x-api-key": "x"})
    assert known.json()["content"] == [{"type": "text", "text": "a"}]
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")


async def test_an_error_within_a_stream_of_messages_has_their_shape() -> None:
    lost = ScriptedServing(STARTED, AnswerDelta("a", [1]), Unavailable("gone"))
    async with client_of(lost) as client:
        body = {**STREAM, "max_tokens": 5}
        response = await client.post("/v1/messages", json=body)
    name, data = events_of(response.text)[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"]) == ("event: error", "error")
    assert error["error"]["type"] == "overloaded_error"

"""A router with API keys, from outside: over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from front_door import front_door
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient, Exhausted, PermissionDenied, Unauthenticated, UnknownRequest
from baton.core.api_keys import make_key, write_keys
from baton.core.errors import NotServed
from baton.core.types import Request
from baton.router.server import RouterServer
from baton.v1 import open_inference_pb2 as oip
from baton.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@dataclass(frozen=True)
class Door:
    server: RouterServer
    keys: dict[str, str]

    def client(self, name: str) -> AsyncClient:
        return AsyncClient(self.server.address, api_key=self.keys.get(name, name))

    def http(self, name: str) -> httpx.AsyncClient:
        key = self.keys.get(name, name)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=f"http://{self.server.http_address}", headers=headers)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    made = {
        "plain": make_key("plain"),
        "other": make_key("other"),
        "slow": make_key("slow", rate=0.01),
        "single": make_key("single", concurrency=1),
        "first": make_key("first", priority=-5),
        "admin": make_key("admin", admin=True),
    }
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(file, [key for _, key in made.values()])
    async with front_door(step_seconds=0.02, keys=str(file)) as server:
        yield Door(server, {name: secret for name, (secret, _) in made.items()})


Call = Callable[[AsyncClient], Coroutine[None, None, object]]
CALLS: list[Call] = [
    lambda client: client.generate("Hello", max_tokens=2),
    lambda client: client.models(),
    lambda client: client.tokenize("Hello"),
    lambda client: client.detokenize([1]),
    lambda client: client.status(),
    lambda client: client.drain("decode-0"),
]


async def test_no_grpc_call_is_answered_without_a_key(door: Door) -> None:
    for key in ("", "baton-wrong"):
        async with door.client(key) as client:
            for call in CALLS:
                with pytest.raises(Unauthenticated):
                    await call(client)


async def test_the_open_inference_protocol_needs_a_key_but_for_health(door: Door) -> None:
    asked = oip.ModelMetadataRequest()
    headers = (("authorization", f"Bearer {door.keys['plain']}"),)
    async with grpc.aio.insecure_channel(door.server.address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
        assert (await stub.ModelMetadata(asked, metadata=headers)).name
        with pytest.raises(grpc.aio.AioRpcError, match="an API key is missing"):
            await stub.ModelMetadata(asked)
        with pytest.raises(grpc.aio.AioRpcError, match="an API key is missing"):
            await stub.ModelStreamInfer(iter([oip.ModelInferRequest()])).read()


async def test_a_users_key_allows_no_admin_calls(door: Door) -> None:
    async with door.client("plain") as client:
        for call in CALLS[:-1]:
            await call(client)
        with pytest.raises(PermissionDenied):
            await CALLS[-1](client)
    async with door.client("admin") as client:
        await CALLS[-1](client)


async def test_only_an_admin_may_scale_and_gets_an_error_without_a_controller(
    door: Door,
) -> None:
    async with door.client("plain") as client:
        with pytest.raises(PermissionDenied):
            await client.scale(decode=2)
    async with door.client("admin") as client:
        with pytest.raises(NotServed, match=r"has no controller.*`baton serve`"):
            await client.scale(decode=2)


async def test_timing_is_for_the_requests_key_and_admins(door: Door) -> None:
    async with door.client("plain") as client:
        answer = await client.generate("Hello", max_tokens=2)
    path = f"/v1/requests/{answer.request_id}/timing"
    for name, told in (("plain", True), ("admin", True), ("other", False)):
        async with door.client(name) as client, door.http(name) as http:
            assert (await http.get(path)).status_code == (200 if told else 404)
            if told:
                assert (await client.timing(answer.request_id)).request_id == answer.request_id
            else:
                with pytest.raises(UnknownRequest):
                    await client.timing(answer.request_id)


async def test_two_keys_may_use_the_same_request_id(door: Door) -> None:
    for name, tokens in (("plain", 2), ("other", 4)):
        async with door.client(name) as client:
            await client.generate("Hello", max_tokens=tokens, request_id="alike")
    for name, tokens in (("plain", 2), ("other", 4), ("admin", 4)):
        async with door.client(name) as client:
            timing = await client.timing("alike")
        assert timing.answers[0].completion_tokens == tokens


async def test_only_admins_see_worker_addresses(door: Door) -> None:
    async with door.client("plain") as client:
        assert not any(each.member.address for each in (await client.status()).workers)
    async with door.client("admin") as client:
        assert all(each.member.address for each in (await client.status()).workers)


async def test_health_needs_no_key(door: Door) -> None:
    async with grpc.aio.insecure_channel(door.server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    async with door.http("") as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200


async def test_http_without_a_key_is_refused_in_the_apis_shape(door: Door) -> None:
    async with door.http("") as http:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("GET", "/nowhere"),
        ):
            response = await http.request(method, path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
    async with door.http("plain") as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


async def test_the_sdk_sends_its_key(door: Door) -> None:
    url = f"http://{door.server.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=door.keys["plain"]) as sdk:
        answer = await sdk.chat.completions.create(model="", **CHAT)  # type: ignore[call-overload]
        assert answer.usage.completion_tokens == 3
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.models.list()


async def test_a_keys_rate_counts_grpc_and_http_together(door: Door) -> None:
    async with door.client("slow") as client, door.http("slow") as http:
        await client.generate("Hello", max_tokens=2)
        with pytest.raises(Exhausted) as refused:
            await client.generate("Hello", max_tokens=2)
        assert refused.value.retry_after > 50
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) > 50
        assert response.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_keys_concurrency_limit_does_not_affect_others(door: Door) -> None:
    async with door.client("single") as client, door.http("single") as http:
        async with client.stream("Hello", max_tokens=1000) as stream:
            await anext(stream)
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 429
            async with door.client("plain") as other:
                await other.generate("Hello", max_tokens=2)
        for _ in range(100):
            response = await http.post("/v1/chat/completions", json=CHAT)
            if response.status_code == 200:
                break
            await asyncio.sleep(0.02)
        assert response.status_code == 200
        several = await http.post("/v1/chat/completions", json={**CHAT, "n": 2})
        assert several.status_code == 400
        inputs = await http.post("/v1/embeddings", json={"input": ["Hello", "Bye"]})
        assert inputs.status_code == 400


@pytest.fixture
def served(door: Door, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that are served."""
    serving = door.server.models.named("").serving
    generate = serving.generate
    requests = []

    async def generate_and_note(request: Request, *more: Any) -> None:
        requests.append(request)
        await generate(request, *more)

    monkeypatch.setattr(serving, "generate", generate_and_note)
    return requests


async def test_no_request_goes_before_its_keys_priority(door: Door, served: list[Request]) -> None:
    for name in ("plain", "first"):
        async with door.client(name) as client, door.http(name) as http:
            await client.generate("Hello", max_tokens=2, priority=-8)
            await http.post("/v1/chat/completions", json={**CHAT, "priority": -8})
            await http.post("/v1/chat/completions", json={**CHAT, "service_tier": "flex"})
            await client.embed(["Hello"], priority=-8)
    assert [each.priority for each in served] == [0, 0, 100, 0, -5, -5, 100, -5]


async def test_two_keys_share_no_cached_pages(door: Door, served: list[Request]) -> None:
    for name in ("plain", "other"):
        async with door.client(name) as client, door.http(name) as http:
            await client.generate("Hello", max_tokens=2, cache_salt="mine")
            await http.post("/v1/chat/completions", json={**CHAT, "cache_salt": "mine"})
            await http.post("/v1/embeddings", json={"input": "Hello", "cache_salt": "mine"})
    assert [each.cache_salt for each in served] == ["plain:mine"] * 3 + ["other:mine"] * 3

"""The response cache of a real router, over HTTP and gRPC, in front of workers that answer at
once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from front_door import front_door

from baton import AsyncClient
from baton.core.api_keys import make_key, write_keys
from baton.router.server import RouterServer
from baton.v1 import inference_pb2, inference_pb2_grpc, timing_pb2

TREE: dict[str, object] = {"cache": {"responses": "exact"}}
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"prompt": "Hello", "max_tokens": 3, "temperature": 0}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Door:
    def __init__(self, server: RouterServer, keys: dict[str, str]) -> None:
        self.server = server
        self.keys = keys
        self.http = httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60)

    async def post(self, name: str = "alice", control: str = "", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        if control:
            headers["cache-control"] = control
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return await self.http.post(path, json=body, headers=headers)

    async def cached(self, name: str = "alice", **body: Any) -> bool:
        """Whether the answer came from the cache."""
        answer = await self.post(name, **body)
        assert answer.status_code == 200, answer.text
        says_so = answer.headers.get("x-baton-cache", "").startswith("exact; age=")
        assert says_so == ("response_cache" in answer.json()["usage"])
        return says_so

    def client(self, name: str) -> AsyncClient:
        return AsyncClient(self.server.address, api_key=self.keys[name])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    made = {name: make_key(name, admin=name == "admin") for name in ("alice", "bob", "admin")}
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(file, [key for _, key in made.values()])
    async with front_door(TREE, keys=str(file)) as server:
        yield Door(server, {name: secret for name, (secret, _) in made.items()})


async def test_an_answer_is_given_again_with_a_label(door: Door) -> None:
    body = {**GREEDY, "prompt": "again"}
    first, second = await door.post(**body), await door.post(**body)
    assert "x-baton-cache" not in first.headers
    assert second.headers["x-baton-cache"].startswith("exact; age=")
    assert first.json()["choices"] == second.json()["choices"]
    usage = second.json()["usage"]
    assert usage.pop("response_cache")["kind"] == "exact"
    assert usage == first.json()["usage"]


async def test_a_stream_is_streamed(door: Door) -> None:
    body = {**GREEDY, "prompt": "stream", "n": 2}
    whole = (await door.post(**body)).json()
    streamed = await door.post(**body, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["x-baton-cache"].startswith("exact")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    for choice in whole["choices"]:
        pieces = [each for chunk in chunks for each in chunk["choices"]]
        mine = [each for each in pieces if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert chunks[-1]["usage"]["response_cache"]["kind"] == "exact"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "temperature": 0}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "temperature": 0}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "temperature": 0, "n": 2}),
    ],
)
async def test_every_api_is_answered_from_it(door: Door, path: str, body: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {door.keys['alice']}"}
    for number in range(3):
        body = {**body, "cache_salt": path, "stream": number == 2}
        answer = await door.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert ("x-baton-cache" in answer.headers) == (number > 0)
        if number < 2:
            assert ("response_cache" in answer.json()["usage"]) == (number > 0)


async def test_many_prompts_of_one_call_have_room_in_the_clients_buffer(door: Door) -> None:
    """Together they have more tokens than may wait for a client."""
    prompts = [f"prompt {number}" for number in range(40)]
    body = {**GREEDY, "max_tokens": 128}
    alone = await asyncio.gather(*(door.post(**{**body, "prompt": each}) for each in prompts))
    together = await door.post(**{**body, "prompt": prompts})
    assert together.headers["x-baton-cache"].startswith("exact")
    texts = [choice["text"] for choice in together.json()["choices"]]
    assert texts == [each.json()["choices"][0]["text"] for each in alone]


async def test_only_repeatable_requests_are_cached(door: Door) -> None:
    sampled = {"prompt": "sampled", "max_tokens": 3, "temperature": 1}
    for _ in range(2):
        assert not await door.cached(**sampled)
    assert not await door.cached(**sampled, seed=5)
    assert await door.cached(**sampled, seed=5)
    assert not await door.cached(**sampled, seed=6)


async def test_no_key_finds_anothers_answers(door: Door) -> None:
    body = {**GREEDY, "prompt": "private"}
    assert not await door.cached("alice", **body)
    assert not await door.cached("bob", **body)
    assert await door.cached("alice", **body)
    assert not await door.cached("alice", **body, cache_salt="bob")
    assert await door.cached("alice", **body, cache_salt="bob")


async def test_cache_control_is_honoured(door: Door) -> None:
    body = {**GREEDY, "prompt": "control"}
    missing = await door.post(control="only-if-cached", **body)
    assert (missing.status_code, missing.json()["error"]["code"]) == (504, "not_cached")
    assert missing.json()["error"]["message"] == "the answer is not cached"
    for _ in range(2):
        assert "x-baton-cache" not in (await door.post(control="no-store", **body)).headers
    assert (await door.post(control="only-if-cached", **body)).status_code == 504
    assert "x-baton-cache" not in (await door.post(control="max-age=0, no-cache", **body)).headers
    assert (await door.post(control="only-if-cached", **body)).status_code == 200


async def test_grpc_is_answered_from_the_same_cache(door: Door) -> None:
    assert not await door.cached(**{**GREEDY, "prompt": "grpc"})
    message = inference_pb2.GenerateRequest(text="grpc", max_tokens=3)
    metadata = [
        ("authorization", f"Bearer {door.keys['alice']}"),
        ("cache-control", "only-if-cached"),
    ]
    async with grpc.aio.insecure_channel(door.server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(message, metadata=metadata)
        events = [event async for event in call]
        trailer = {**dict(await call.trailing_metadata())}
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "finished"]
    assert events[0].started.prefill_worker == ""
    assert events[1].delta.token_ids == [81] * 3
    assert events[2].finished.usage.response_cache.kind == "exact"
    assert str(trailer["x-baton-cache"]).startswith("exact; age=")
    timing = timing_pb2.RequestTiming.FromString(bytes(trailer["baton-timing-bin"]))  # type: ignore[arg-type]
    (answer,) = timing.answers
    assert answer.response_cache.kind == "exact"
    assert (answer.attempts, answer.completion_tokens) == (0, 3)
    kinds = [phase.kind for phase in answer.phases]
    assert timing_pb2.PHASE_KIND_RESPONSE_CACHE in kinds
    assert timing_pb2.PHASE_KIND_NETWORK not in kinds
    assert answer.end_to_end_seconds == pytest.approx(
        sum(phase.seconds for phase in answer.phases if not phase.hidden), rel=1e-3
    )


async def test_an_admin_clears_a_tenants_answers(door: Door) -> None:
    body = {**GREEDY, "prompt": "cleared"}
    for name in ("alice", "bob"):
        await door.cached(name, **body)
    async with door.client("admin") as client:
        assert await client.clear_responses("alice") >= 1
        assert await client.clear_responses("alice") == 0
    assert await door.cached("bob", **body)
    assert not await door.cached("alice", **body)


async def test_hits_and_misses_are_counted(door: Door) -> None:
    def count(result: str) -> float:
        metrics = door.server._cache_metrics
        return float(metrics.response_lookups.labels(result=result)._value.get())

    before = count("hit"), count("miss")
    body = {**GREEDY, "prompt": "counted"}
    await door.cached(**body)
    await door.cached(**body)
    assert (count("hit"), count("miss")) == (before[0] + 1, before[1] + 1)


async def test_a_router_without_a_cache_says_so() -> None:
    async with front_door() as server, httpx.AsyncClient() as http:
        url = f"http://{server.http_address}/v1/completions"
        for _ in range(2):
            assert "x-baton-cache" not in (await http.post(url, json=GREEDY)).headers
        refused = await http.post(url, json=GREEDY, headers={"cache-control": "only-if-cached"})
        assert refused.status_code == 504

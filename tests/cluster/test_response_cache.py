"""Answers from the response cache, on the embedded model's first layers: two routers that share a
real Redis."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from attached_router import attached_router
from processes import ProcessCluster
from waiting import until

from baton.router.response_cache import redis_store
from bench.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONLY = {"cache-control": "only-if-cached"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
DAYS = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2, 3]}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": DAYS}}
CALL = {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
FORM = {"type": "json_schema", "json_schema": {"name": "days", "schema": DAYS}}
SAMPLED = {"temperature": 1, "seed": 3, "max_tokens": 6}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routers(
    shallow: Path, shallow_pair: ProcessCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[httpx.AsyncClient]]:
    folder: Path = tmp_path_factory.mktemp("redis")
    with RedisServer(folder) as redis, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_store, "LOOKUP_SECONDS", 5.0)  # a busy machine is no failure
        async with AsyncExitStack() as stack:
            clients = []
            cache = {"responses": "exact", "redis": redis.url}
            tree: dict[str, object] = {"model": str(shallow), "cache": cache}
            for _ in range(2):
                server = await stack.enter_async_context(attached_router(shallow_pair, tree))
                url = f"http://{server.http_address}"
                client = httpx.AsyncClient(base_url=url, timeout=120)
                clients.append(await stack.enter_async_context(client))
            yield clients


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what is each call's own."""
    answer = {key: value for key, value in answer.items() if key not in ("id", "created")}
    answer["usage"] = {**answer["usage"], "response_cache": None}
    return answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": QUESTION, "temperature": 0, "max_tokens": 12}),
        (CHAT, {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, **SAMPLED}),
        (CHAT, {"messages": QUESTION, "n": 3, **SAMPLED}),
        (CHAT, CALL),
        (CHAT, {"messages": QUESTION, "response_format": FORM, **SAMPLED}),
        (TEXT, {"prompt": "One, two,", "stop": [" four", ","], "logprobs": 1, **SAMPLED}),
        (TEXT, {"prompt": ["One, two,", "Red, green,"], "echo": True, **SAMPLED}),
        (TEXT, {"prompt": "One, two,", "prompt_logprobs": 1, "max_tokens": 0, "temperature": 0}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 8, "temperature": 0}),
    ],
)
async def test_another_router_gives_the_same_answer_again(
    routers: list[httpx.AsyncClient], path: str, body: dict[str, Any]
) -> None:
    one, other = routers
    first = await one.post(path, json=body)
    assert first.status_code == 200, first.text
    assert "x-baton-cache" not in first.headers
    second = await _kept(other, path, body)
    assert second.headers["x-baton-cache"].startswith("exact; age=")
    assert second.json()["usage"]["response_cache"]["kind"] == "exact"
    assert essence(first.json()) == essence(second.json())


async def test_a_streamed_call_of_a_tool_has_the_same_id(routers: list[httpx.AsyncClient]) -> None:
    body = {**CALL, "max_tokens": 40}
    first = (await routers[0].post(CHAT, json=body)).json()["choices"][0]
    streamed = await _kept(routers[1], CHAT, {**body, "stream": True})
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0] for line in lines]
    (call,) = first["message"]["tool_calls"]
    pieces = [each for delta in deltas for each in delta["delta"].get("tool_calls", ())]
    assert [each["id"] for each in pieces if "id" in each] == [call["id"]]
    arguments = "".join(each["function"]["arguments"] for each in pieces)
    assert arguments == call["function"]["arguments"]
    assert deltas[-1]["finish_reason"] == first["finish_reason"]


async def test_a_cancelled_answer_is_not_kept(routers: list[httpx.AsyncClient]) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    async with routers[0].stream("POST", TEXT, json={**body, "stream": True}) as response:
        await anext(response.aiter_lines())
    assert (await routers[0].post(TEXT, json=body, headers=ONLY)).status_code == 504


async def _kept(router: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer from the cache, once it is there: it is stored after the last byte is sent."""
    answers: list[httpx.Response] = []

    async def found() -> bool:
        answers.append(await router.post(path, json=body, headers=ONLY))
        return answers[-1].status_code != 504

    await until(found)
    assert answers[-1].status_code == 200, answers[-1].text
    return answers[-1]

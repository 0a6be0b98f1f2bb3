"""The semantic cache of a real router with a real Redis, in front of workers that embed every
question alike: what is found depends on scope and consent alone."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from front_door import front_door
from patience import be_patient, connected
from rich.console import Console
from tiny_encoders import save_encoder

from baton import AsyncClient
from baton.cli.views import request_table, waterfall
from baton.core.api_keys import make_key, write_keys
from baton.core.errors import InvalidConfig
from baton.router.server import RouterServer
from baton.v1 import inference_pb2, inference_pb2_grpc, timing_pb2
from bench.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONLY = {"cache-control": "only-if-cached"}
LABEL = re.compile(r"semantic; similarity=(1\.0|0\.99\d*); age=\d+")
NAMES = ("alice", "bob", "carol")
DAYS = {"type": "object", "properties": {"days": {"enum": [1, 2]}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": DAYS}}
FORM = {"type": "json_schema", "json_schema": {"name": "days", "schema": DAYS}}


class Door:
    def __init__(self, server: RouterServer, keys: dict[str, str]) -> None:
        self.server = server
        self.keys = keys
        self.http = httpx.AsyncClient(base_url=f"http://{server.http_address}/v1", timeout=60)

    async def ask(
        self, question: str, name: str = "alice", headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """Greedy, and with consent unless `body` says otherwise."""
        body = {"max_tokens": 3, "temperature": 0, "semantic_similarity": 0, **body}
        body.setdefault("messages", [{"role": "user", "content": question}])
        headers = {"authorization": f"Bearer {self.keys[name]}", **(headers or {})}
        answer = await self.http.post("/chat/completions", json=body, headers=headers)
        await self.settle()
        return answer

    async def settle(self) -> None:
        assert self.server._responses
        await self.server._responses.settle()

    async def finds(self, question: str, name: str = "alice", **body: Any) -> bool:
        """Whether another's answer is given."""
        headers = {**ONLY, **body.pop("headers", {})}
        answer = await self.ask(question, name, headers, **body)
        assert answer.status_code in (200, 504), answer.text
        return "semantic" in answer.headers.get("x-baton-cache", "")

    def count(self, result: str) -> float:
        return float(self.server._cache_metrics.semantic_lookups.labels(result=result)._value.get())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    folder = tmp_path_factory.mktemp("semantic")
    save_encoder(folder / "mini")
    made = {
        name: make_key(name, semantic_similarity=0.5 if name == "carol" else None) for name in NAMES
    }
    write_keys(folder / "keys.yaml", [key for _, key in made.values()])
    with RedisServer(folder) as redis, pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        cache = {"responses": "semantic", "redis": redis.url}
        tree: dict[str, object] = {"cache": cache, "embedding_model": str(folder / "mini")}
        async with front_door(tree, keys=str(folder / "keys.yaml")) as server:
            await connected(server)
            yield Door(server, {name: secret for name, (secret, _) in made.items()})


async def test_a_similar_question_gets_the_answer_with_a_label(door: Door) -> None:
    salt = {"cache_salt": "label"}
    first = await door.ask("one question", **salt)
    before = door.count("hit")
    second = await door.ask("another question", headers=ONLY, **salt)
    assert "x-baton-cache" not in first.headers
    assert LABEL.fullmatch(second.headers["x-baton-cache"]), second.headers["x-baton-cache"]
    usage = second.json()["usage"]["response_cache"]
    assert (usage["kind"], usage["similarity"] > 0.99) == ("semantic", True)
    assert second.json()["choices"] == first.json()["choices"]
    assert door.count("hit") == before + 1
    again = await door.ask("one question", headers=ONLY, **salt)
    assert again.headers["x-baton-cache"].startswith("exact; age=")


async def test_grpc_and_why_say_so(door: Door) -> None:
    await door.ask("one question", cache_salt="grpc")
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="another")])
    message = inference_pb2.GenerateRequest(
        chat=chat, max_tokens=3, cache_salt="grpc", semantic_similarity=0.9
    )
    metadata = [("authorization", f"Bearer {door.keys['alice']}"), *ONLY.items()]
    async with grpc.aio.insecure_channel(door.server.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(message, metadata=metadata)
        events = [event async for event in call]
        trailer = {**dict(await call.trailing_metadata())}
    assert events[-1].finished.usage.response_cache.similarity > 0.99
    assert LABEL.fullmatch(str(trailer["x-baton-cache"]))
    timing = timing_pb2.RequestTiming.FromString(bytes(trailer["baton-timing-bin"]))  # type: ignore[arg-type]
    assert timing.answers[0].response_cache.kind == "semantic"
    cells = [*request_table([timing]).columns[3].cells]
    assert "response cache (semantic, similarity " in str(cells[0])
    async with AsyncClient(door.server.address, api_key=door.keys["alice"]) as client:
        answer = await client.chat(
            [("user", "a third")], max_tokens=3, cache_salt="grpc", semantic_similarity=0.9
        )
    assert answer.usage.response_cache in ("", "semantic")  # a race with computing


async def test_only_requests_that_allow_it_are_answered(door: Door) -> None:
    silent = {"cache_salt": "consent", "semantic_similarity": None}
    header = {"x-baton-semantic-similarity": "0.5"}
    await door.ask("one question", **silent)  # which others must not find either
    assert not await door.finds("another", cache_salt="consent")
    await door.ask("a third", headers=header, **silent)
    assert not await door.finds("another", **silent)
    assert await door.finds("another", cache_salt="consent")
    assert await door.finds("another", headers=header, **silent)
    await door.ask("one question", "carol", **silent)
    assert await door.finds("another", "carol", **silent)  # by her key


async def test_no_tenant_finds_anothers_answers(door: Door) -> None:
    await door.ask("one question", "alice", cache_salt="tenants")
    assert not await door.finds("another", "bob", cache_salt="tenants")
    assert not await door.finds("another", "alice", cache_salt="another salt")
    assert await door.finds("another", "alice", cache_salt="tenants")


def chat(*contents: str, system: str = "Be brief.") -> dict[str, Any]:
    roles = ("user", "assistant") * 3
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *turns]}


async def test_what_precedes_the_question_must_be_the_same(door: Door) -> None:
    salt = {"cache_salt": "context"}
    await door.ask("", **chat("Hello", "Hi", "one question"), **salt)
    assert await door.finds("", **chat("Hello", "Hi", "another"), **salt)
    assert not await door.finds("", **chat("Hello", "Hi there", "another"), **salt)
    assert not await door.finds("", **chat("another"), **salt)
    other = chat("Hello", "Hi", "another", system="Be long.")
    assert not await door.finds("", **other, **salt)
    assert not await door.finds("", **chat("Hello", "Hi", "another"), **salt, max_tokens=4)
    assert not await door.finds("", **chat("Hello", "Hi", "another"), **salt, stop=["x"])


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [TOOL]},
        {"response_format": FORM},
        {"logprobs": True},
        {"n": 2},
        {"temperature": 1},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_some_requests_are_never_answered_from_it(door: Door, body: dict[str, Any]) -> None:
    salt = {"cache_salt": f"never {body}"}
    asked = await door.ask("one question", **body, **salt)
    assert asked.status_code == 200, asked.text
    assert not await door.finds("another", **body, **salt)
    assert not await door.finds("another", **salt)


async def test_cache_control_is_honoured(door: Door) -> None:
    salt = {"cache_salt": "control"}
    await door.ask("one question", headers={"cache-control": "no-store"}, **salt)
    assert not await door.finds("another", **salt)
    await door.ask("one question", headers={"cache-control": "no-cache"}, **salt)
    assert await door.finds("another", **salt)
    for control in ("no-store", "no-cache"):
        computed = await door.ask("a third", headers={"cache-control": control}, **salt)
        assert "x-baton-cache" not in computed.headers


async def test_a_question_that_the_embedder_cannot_take_is_no_error(door: Door) -> None:
    long = "w1 " * 100
    before = door.count("failed")
    assert (await door.ask(long, cache_salt="long")).status_code == 200
    assert not await door.finds(f"{long} again", cache_salt="long")
    assert door.count("failed") >= before + 1


async def test_a_similarity_out_of_range_is_refused(door: Door) -> None:
    for wrong in ({"semantic_similarity": 1.5}, {"semantic_similarity": "much"}):
        assert (await door.ask("x", **wrong)).status_code == 400
    for header in ("1.5", "much", "nan"):
        refused = await door.ask("x", headers={"x-baton-semantic-similarity": header})
        assert refused.status_code == 400
        assert "x-baton-semantic-similarity must be 0 to 1" in refused.text


async def test_a_refused_hit_is_computed_and_shown(tmp_path: Path) -> None:
    """These workers answer every question with a letter, and so never with yes."""
    save_encoder(tmp_path / "mini")
    with RedisServer(tmp_path) as redis, pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        cache = {"responses": "semantic", "redis": redis.url, "semantic_verify_seconds": 60}
        tree: dict[str, object] = {"cache": cache, "embedding_model": str(tmp_path / "mini")}
        async with front_door(tree) as server:
            await connected(server)
            door = Door(server, {"alice": "none"})
            await door.ask("one question")
            refused = await door.ask("another question", headers=ONLY)
            assert refused.status_code == 504
            assert (door.count("refused"), door.count("hit")) == (1, 0)
            name = refused.headers["x-request-id"]
            async with AsyncClient(server.address) as client:
                timing = await client.timing(name)
    hit = timing.answers[0].refused_hit
    assert (hit.denied, hit.similarity > 0.99) == (True, True)
    shown = io.StringIO()
    Console(file=shown, width=200).print(waterfall(timing))
    assert "was refused: the model denied that both ask the same" in shown.getvalue()


@pytest.mark.parametrize(
    ("tree", "missing"),
    [
        (lambda folder: {"embedding_model": str(folder)}, "needs cache.redis"),
        (lambda folder: {"redis": "redis://127.0.0.1:1"}, "needs an embedding_model"),
    ],
)
async def test_it_needs_a_redis_and_an_embedding_model(
    tmp_path: Path, tree: Callable[[Path], dict[str, str]], missing: str
) -> None:
    save_encoder(tmp_path / "mini")
    given = tree(tmp_path / "mini")
    cache = {"responses": "semantic", "redis": given.pop("redis", "")}
    with pytest.raises(InvalidConfig, match=missing):
        async with front_door({"cache": cache, **given}):
            pass

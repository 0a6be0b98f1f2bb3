"""API keys that are limited to models, from outside: over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from front_door import front_door
from waiting import until

from baton import AsyncClient, PermissionDenied, UnknownModel
from baton.core import config as configs
from baton.core.api_keys import make_key, write_keys
from baton.core.model_store import EMBEDDED, EMBEDDED_NAME
from baton.core.process import StopSignal
from baton.core.types import Adapter
from baton.router.server import RouterServer
from baton.v1 import open_inference_pb2 as oip
from baton.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

ADAPTERS = ("sql", "acme/one", "acme/two", "other")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Door:
    server: RouterServer
    keys: dict[str, str]

    def client(self, name: str) -> AsyncClient:
        return AsyncClient(self.server.address, api_key=self.keys[name])

    def http(self, name: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        return httpx.AsyncClient(base_url=f"http://{self.server.http_address}", headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    made = {
        "all": make_key("all"),
        "acme": make_key("acme", models=["acme/*", "sql", "gone"]),
        "base": make_key("base", models=[EMBEDDED_NAME]),
    }
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder / "keys.yaml", [key for _, key in made.values()])
    tree: dict[str, object] = {"batches": {"folder": str(folder / "batches")}}
    async with front_door(tree, keys=str(folder / "keys.yaml")) as server:
        for place, name in enumerate(ADAPTERS):
            adapters = server.models.named("").serving.adapters
            adapters.serve(name, Adapter(bytes([place]) * 16, "/nowhere"))
        yield Door(server, {name: secret for name, (secret, _) in made.items()})


async def test_a_key_sees_its_own_models(door: Door) -> None:
    seen = {
        "all": [EMBEDDED_NAME, *ADAPTERS],
        "acme": ["sql", "acme/one", "acme/two"],
        "base": [EMBEDDED_NAME],
    }
    for name, models in seen.items():
        async with door.client(name) as client, door.http(name) as http:
            assert [model.name for model in await client.models()] == models
            listed = (await http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == models
            assert (await http.get(f"/v1/models/{models[-1]}")).status_code == 200


async def test_http_answers_for_its_models_alone(door: Door) -> None:
    async with door.http("acme") as http:
        for path, body in BODIES.items():
            allowed = await http.post(path, json={**body, "model": "acme/one"})
            assert allowed.status_code == 200, allowed.text
            for model in ("other", "nobody's", EMBEDDED_NAME):
                refused = await http.post(path, json={**body, "model": model})
                assert refused.status_code == 403, path
                assert f"may not use the model {model!r}" in refused.json()["error"]["message"]
        assert (await http.get("/v1/models/other")).status_code == 403


async def test_an_unnamed_model_is_the_base(door: Door) -> None:
    for name, status in (("acme", 403), ("base", 200)):
        async with door.http(name) as http:
            for path, body in BODIES.items():
                assert (await http.post(path, json=body)).status_code == status, path


async def test_an_allowed_name_that_is_not_served_lists_allowed_ones(door: Door) -> None:
    async with door.http("acme") as http, door.client("acme") as client:
        unknown = await http.post("/v1/chat/completions", json={**CHAT, "model": "gone"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"].endswith("serves 'sql', 'acme/one', 'acme/two'")
        with pytest.raises(UnknownModel, match="serves 'sql', 'acme/one', 'acme/two'"):
            await client.generate("Hello", model="gone")


async def test_the_sdk_raises_its_own_error(door: Door) -> None:
    url = f"http://{door.server.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=door.keys["acme"]) as sdk:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await sdk.completions.create(model="other", prompt="Hello")
    assert (refused.value.code, refused.value.param) == ("permission_denied", "model")


Call = Callable[[AsyncClient, str], Coroutine[None, None, object]]
CALLS: list[Call] = [
    lambda client, model: client.generate("Hello", model=model, max_tokens=2),
    lambda client, model: client.embed(["Hello"], model=model),
    lambda client, model: client.tokenize("Hello", model=model),
    lambda client, model: client.detokenize([1], model=model),
]


@pytest.mark.parametrize("call", CALLS)
async def test_grpc_answers_for_its_models_alone(door: Door, call: Call) -> None:
    async with door.client("acme") as client:
        await call(client, "sql")
        for model in ("other", "nobody's", ""):
            with pytest.raises(PermissionDenied) as refused:
                await call(client, model)
            assert refused.value.field == "model"


async def test_the_open_inference_protocol_answers_for_its_models_alone(door: Door) -> None:
    headers = (("authorization", f"Bearer {door.keys['acme']}"),)

    def infer(model: str) -> oip.ModelInferRequest:
        message = oip.ModelInferRequest(model_name=model)
        tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"Hello")
        return message

    async with grpc.aio.insecure_channel(door.server.address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        calls: list[Callable[[str], Any]] = [
            lambda model: stub.ModelReady(oip.ModelReadyRequest(name=model), metadata=headers),
            lambda model: stub.ModelMetadata(
                oip.ModelMetadataRequest(name=model), metadata=headers
            ),
            lambda model: stub.ModelInfer(infer(model), metadata=headers),
        ]
        for call in calls:
            await call("acme/two")
            with pytest.raises(grpc.aio.AioRpcError, match="may not use the model 'other'") as told:
                await call("other")
            assert told.value.code() is grpc.StatusCode.PERMISSION_DENIED
        streamed = await stub.ModelStreamInfer(iter([infer("other")]), metadata=headers).read()
        assert "may not use the model 'other'" in streamed.error_message


async def test_a_batchs_lines_are_refused_one_by_one(door: Door) -> None:
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/chat/completions",
         "body": {**CHAT, "model": model}}
        for model in ("sql", "other")
    ]  # fmt: skip
    file = "\n".join(map(json.dumps, lines)).encode()
    url = f"http://{door.server.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=door.keys["acme"]) as sdk:
        uploaded = await sdk.files.create(file=("in.jsonl", file), purpose="batch")
        batch = await sdk.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def ended() -> bool:
            return (await sdk.batches.retrieve(batch.id)).status == "completed"

        await until(ended)
        batch = await sdk.batches.retrieve(batch.id)
        assert batch.error_file_id
        assert batch.output_file_id
        done = json.loads((await sdk.files.content(batch.output_file_id)).text)
        failed = json.loads((await sdk.files.content(batch.error_file_id)).text)
    assert (done["custom_id"], failed["custom_id"]) == ("sql", "other")
    assert failed["response"]["status_code"] == 403


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_models(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    """One has an adapter; neither has workers."""
    made = {
        "admin": make_key("admin", models=["one"], admin=True),
        "all": make_key("all"),
        "one": make_key("one", models=["one"]),
        "sql": make_key("sql", models=["sql"]),
        "none": make_key("none", models=["gone"]),
    }
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder / "keys.yaml", [key for _, key in made.values()])
    router = {"port": 0, "http_port": 0, "metrics_port": 0, "keys": str(folder / "keys.yaml")}
    tree: dict[str, object] = {name: {"model": EMBEDDED} for name in ("one", "two")}
    config = configs.parse({"models": tree, "router": router})
    server, stopping = RouterServer(config), StopSignal()
    await server.start()
    server.models.named("two").serving.adapters.serve("sql", Adapter(bytes(16), "/nowhere"))
    serving = asyncio.ensure_future(server.serve_until(stopping))
    yield Door(server, {name: secret for name, (secret, _) in made.items()})
    stopping.request()
    await serving


async def test_a_key_sees_the_state_of_its_own_models(two_models: Door) -> None:
    """An admin sees all; an adapter's key sees the model that it is of."""
    everything = ["one", "two"]
    seen = {"admin": everything, "all": everything, "one": ["one"], "sql": ["two"], "none": []}
    for key, models in seen.items():
        async with two_models.http(key) as http, two_models.client(key) as client:
            shown = (await http.get("/v1/cluster")).json()
            assert [each["name"] for each in shown["models"]] == models
            status = await client.status()
            assert [each.name for each in status.models] == models
            assert shown["model"] == status.model == (models[0] if models else "")
            for path in ("/v1/diagnosis", "/v1/trends"):
                assert (await http.get(path)).status_code == (200 if models else 403)
                for model in everything:
                    allowed = (await http.get(path, params={"model": model})).status_code
                    assert allowed == (200 if model in models else 403), (key, model)
            unknown = await http.get("/v1/trends", params={"model": "other"})
            assert unknown.status_code == (404 if key == "all" else 403), unknown.text
            assert set(re.findall("'(one|two)'", unknown.text)) <= set(models)


async def test_models_are_added_by_admins_alone(two_models: Door) -> None:
    bodies = {"load": {"model": "three", "path": EMBEDDED}, "unload": {"model": "one"}}
    for name, body in bodies.items():
        for key, status in (("all", 403), ("admin", 400)):  # there is no controller
            async with two_models.http(key) as http:
                answer = await http.post(f"/v1/models/{name}", json=body)
                assert answer.status_code == status, answer.text
    assert two_models.server.models.names() == ["one", "two", "sql"]

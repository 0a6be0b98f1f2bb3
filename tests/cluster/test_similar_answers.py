"""Answers to similar questions, which a real encoder on the prefill worker embeds: two routers that
share a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from attached_router import attached_router
from patience import be_patient, connected
from processes import ProcessCluster
from text_model import save_text_model
from tiny_encoders import save_encoder
from transformers import AutoModelForCausalLM
from waiting import until

from baton.router.prompts.text import Text
from baton.router.requests.question_requests import yes_and_no
from baton.router.response_cache.verification import verification_chat
from bench.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONLY, RENEW = "only-if-cached", "no-cache"
LEAST = 0.9998  # random weights give texts similar vectors
ASKED = "w1 w2 w3 w4 w5 w6 w7 w8"
OTHERS = ["w1 w2 w3 w4 w5 w6 w7 w9", "w60 w50 w40", "w9", "w1 w2 w3 w4 w5 w6 w8 w7"]


class Served:
    def __init__(self, routers: list[httpx.AsyncClient], encoder: Any, model: Path) -> None:
        self.routers = routers
        self._encoder = encoder
        self._text = Text.load(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def confirms(self, earlier: str, question: str) -> bool:
        """Whether transformers finds yes likelier than no."""
        tokens = self._text.encode(verification_chat(earlier, question))
        same, other = yes_and_no(self._text)
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens])).logits[0, -1]
        return bool(logits[same] > logits[other])

    def similarity(self, one: str, other: str) -> float:
        return float(torch.cosine_similarity(self._vector(one), self._vector(other), dim=0))

    def _vector(self, text: str) -> torch.Tensor:
        tokens = [2, *(int(word[1:]) + 4 for word in text.split()), 3]
        with torch.no_grad():
            states = self._encoder(torch.tensor([tokens])).last_hidden_state[0]
        return torch.as_tensor(states.double().mean(0))

    async def ask(self, router: int, question: str, control: str) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 4,
            "temperature": 0,
            "semantic_similarity": LEAST,
        }
        headers = {"cache-control": control}
        return await self.routers[router].post("/v1/chat/completions", json=body, headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("semantic")
    save_text_model(folder / "model", seed=2)  # which neither confirms nor denies everything
    encoder = save_encoder(folder / "mini")
    shared = {"model": str(folder / "model"), "embedding_model": str(folder / "mini")}
    tree: dict[str, object] = {
        "embedding_model": str(folder / "mini"),
        "page_size": 4,
        "prefill": {"kv_memory": "4MiB", "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
    }
    with (
        RedisServer(folder) as redis,
        pytest.MonkeyPatch.context() as patch,
        ProcessCluster(folder / "model", folder, tree=tree) as cluster,
    ):
        be_patient(patch)
        cache = {"responses": "semantic", "redis": redis.url, "semantic_similarity": LEAST}
        async with AsyncExitStack() as stack:
            clients = []
            for seconds in (0, 0, 60):
                section = {**cache, "semantic_verify_seconds": seconds}
                router = attached_router(cluster, {**shared, "cache": section})
                server = await stack.enter_async_context(router)
                await connected(server)
                client = httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60)
                clients.append(await stack.enter_async_context(client))
            yield Served(clients, encoder, folder / "model")
        cluster.wait_idle()


async def test_another_router_answers_similar_questions_and_no_others(served: Served) -> None:
    first = await served.ask(0, ASKED, RENEW)
    assert first.status_code == 200, first.text

    async def stored() -> bool:
        return (await served.ask(1, OTHERS[0], ONLY)).status_code == 200

    assert served.similarity(ASKED, OTHERS[0]) > LEAST
    await until(stored)
    hits = 0
    for question in OTHERS:
        expected = served.similarity(ASKED, question)
        answer = await served.ask(1, question, ONLY)
        assert (answer.status_code == 200) == (expected >= LEAST), (expected, answer.text)
        if answer.status_code == 200:
            hits += 1
            usage = answer.json()["usage"]["response_cache"]
            assert usage["kind"] == "semantic"
            assert usage["similarity"] == pytest.approx(expected, abs=1e-4)
            assert answer.json()["choices"] == first.json()["choices"]
    assert 0 < hits < len(OTHERS)


async def test_the_served_model_decides_whether_a_hit_is_given(served: Served) -> None:
    similar = [ASKED.replace("w8", f"w{number}") for number in (9, 10, 12, 13)]
    assert all(served.similarity(ASKED, each) > LEAST for each in similar)
    assert (await served.ask(2, ASKED, RENEW)).status_code == 200

    async def stored() -> bool:
        return (await served.ask(2, ASKED, ONLY)).status_code == 200

    await until(stored)
    confirmed = [served.confirms(ASKED, each) for each in similar]
    given = [await served.ask(2, each, ONLY) for each in similar]
    assert set(confirmed) == {True, False}
    assert [answer.status_code == 200 for answer in given] == confirmed
    for answer, each in zip(given, confirmed, strict=True):
        if each:
            assert answer.headers["x-baton-cache"].endswith("; verified")
            assert answer.json()["usage"]["response_cache"]["verified"] is True

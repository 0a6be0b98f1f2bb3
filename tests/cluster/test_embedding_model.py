"""An encoder beside the served model: its vectors are transformers', also under load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from processes import ProcessCluster
from tiny_encoders import save_encoder
from tiny_models import TINY_MODELS, save

from baton import AsyncClient, Client, InvalidRequest
from baton.core.errors import PromptTooLong, UnknownModel

TEXTS = ["w1", "w5 w9 w3", " ".join(f"w{number}" for number in range(60)), "w2 w2 w94"]
REFUSED: list[tuple[str, dict[str, object], int, str]] = [
    ("embeddings", {"input": "w1", "pooling": "mean"}, 400, "pools in its own way"),
    ("embeddings", {"input": "w1 " * 63}, 400, "has 65 tokens; the model takes 64"),
    ("embeddings", {"input": [[99]]}, 400, "outside the vocabulary of 99"),
    ("embeddings", {"input": "w1", "truncate_prompt_tokens": 3}, 400, "not truncated"),
    ("embeddings", {"input": "w1", "dimensions": 33}, 400, "dimensions must be 1 to 32"),
    ("embeddings", {"input": "w1", "model": "other"}, 404, "there is no model 'other'"),
    ("completions", {"prompt": "w1"}, 400, "embeds and cannot answer"),
]


class Served(NamedTuple):
    cluster: ProcessCluster
    oracle: Any
    base: Any

    def expected(self, text: str) -> np.ndarray[Any, Any]:
        tokens = [2, *(int(word[1:]) + 4 for word in text.split()), 3]
        with torch.no_grad():
            pooled = self.oracle(torch.tensor([tokens])).last_hidden_state[0].double().mean(0)
        return np.asarray(pooled / pooled.norm())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("encoder")
    base, oracle = save(TINY_MODELS["llama"], folder / "model"), save_encoder(folder / "mini")
    tree: dict[str, object] = {
        "embedding_model": str(folder / "mini"),
        "page_size": 4,
        "prefill": {"kv_memory": "4MiB", "chunk_tokens": 32, "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
    }
    with ProcessCluster(folder / "model", folder, tree=tree) as cluster:
        yield Served(cluster, oracle, base)
        cluster.wait_idle()


async def test_vectors_are_transformers_beside_other_requests(served: Served) -> None:
    async with AsyncClient(served.cluster.address) as client:
        for _ in range(5):
            *vectors, answer, own = await asyncio.gather(
                *(client.embed(TEXTS[place:], model="mini") for place in range(len(TEXTS))),
                client.generate([5, 6, 7] * 9, max_tokens=5),
                client.embed([[5, 6, 7]], normalize=False),
            )
            assert len(answer.token_ids) == 5
            for place, found in enumerate(vectors):
                for vector, text in zip(found, TEXTS[place:], strict=True):
                    assert np.abs(np.array(vector) - served.expected(text)).max() < 1e-5
            with torch.no_grad():
                right = served.base.model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
            assert own[0] == pytest.approx(right.tolist(), abs=1e-5)


def test_http_serves_and_lists_it_and_refuses_what_it_cannot(served: Served) -> None:
    with httpx.Client(base_url=f"http://{served.cluster.http}/v1", timeout=60) as http:
        body = {"model": "mini", "input": TEXTS}
        answer = http.post("/embeddings", json=body).json()
        assert answer["model"] == "mini"
        assert answer["usage"]["prompt_tokens"] == sum(len(each.split()) + 2 for each in TEXTS)
        for each, text in zip(answer["data"], TEXTS, strict=True):
            assert np.abs(each["embedding"] - served.expected(text)).max() < 1e-5
        models = {each["id"]: each for each in http.get("/models").json()["data"]}
        assert models["mini"]["max_model_len"] == 64
        assert "parent" not in http.get("/models/mini").json()
        for path, wrong, status, said in REFUSED:
            refused = http.post(f"/{path}", json={"model": "mini", **wrong})
            assert (refused.status_code, said in refused.text) == (status, True), refused.text


def test_grpc_lists_it_and_refuses_what_it_cannot(served: Served) -> None:
    with Client(served.cluster.address) as client:
        with pytest.raises(PromptTooLong):
            client.embed(["w1 " * 63], model="mini")
        with pytest.raises(InvalidRequest, match="pools in its own way"):
            client.embed(["w1"], model="mini", pooling="last")
        with pytest.raises(UnknownModel):
            client.embed(["w1"], model="other")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            client.embed(["w1"])

"""Embeddings of prompts: the engine against transformers, and the vectors' form."""

from __future__ import annotations

import base64
import struct
from array import array
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engine_loop import load
from front_door import front_door
from tiny_models import TINY_MODELS, save

from baton import AsyncClient
from baton.core.errors import InvalidRequest, Unavailable
from baton.core.types import AttemptKey, Pooling, Sampling, Work
from baton.core.wire import work_from, work_to
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.router.answers.answer_events import AnswerDelta, EmbeddedInputs

LONG = [5, 3, 8, 120, 44, 7, 90, 91, 3, 8, 120, 1, 2, 60, 61, 62, 63, 14, 15]
SHORT = [9, 8, 7]
WRONG: list[tuple[dict[str, object], str]] = [
    ({"input": []}, "input must not be empty"),
    ({"input": ""}, "the prompt is empty"),
    ({"input": "a", "pooling": "max"}, "pooling must be"),
    ({"input": "a", "dimensions": 0}, "dimensions must be at least 1"),
    ({"input": "a", "dimensions": 3}, "dimensions must be 1 to 2"),
    ({"input": [[999999]]}, "outside the vocabulary"),
    ({}, "input is missing"),
]


def begin(
    engine: Engine, prompt: list[int], pooling: Pooling | None, logprobs: int | None = None
) -> Sequence:
    key = AttemptKey(str(prompt), 1)
    work = Work(key, prompt, Sampling(), 1, frozenset(), prompt_logprobs=logprobs, pooling=pooling)
    pages = engine.pool.pages_for(len(prompt) + 1)
    lease = engine.pool.acquire(pages)
    lease.cover(pages)
    return Sequence(work, lease)


def run(engine: Engine, sequences: list[Sequence], chunk: int) -> None:
    """Until each has its token."""
    while left := [each for each in sequences if each.generated == 0]:
        plan = {each: min(chunk, each.uncomputed) for each in left}
        for sequence, token in zip(plan, engine.step(plan), strict=True):
            if token is not None:
                sequence.append(token if isinstance(token, int) else 0)


def embedding(sequence: Sequence) -> np.ndarray:
    assert sequence.pooled is not None
    return np.frombuffer(sequence.pooled.embedding, "<f4")


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "granite"])
@pytest.mark.parametrize(
    ("engine", "chunk"),
    [("native", 1), ("native", 4), ("native", 100), ("transformers", 1), ("transformers", 4)],
)
def test_embeddings_are_transformers_in_chunks_of_any_size(
    tmp_path: Path, name: str, engine: str, chunk: int
) -> None:
    oracle = save(TINY_MODELS[name], tmp_path)
    runs = load(tmp_path, page_size=4, engine=engine)
    wanted = [
        (LONG, Pooling.MEAN),
        (SHORT, Pooling.LAST),
        (LONG[:9], Pooling.LAST),
        (LONG[:1], Pooling.MEAN),
        (SHORT[::-1], Pooling.MEAN),
    ]
    sequences = [begin(runs, prompt, pooling) for prompt, pooling in wanted]
    # In company: a prompt that is scored, and one of which only a token is wanted.
    others = [begin(runs, LONG[:7], None, logprobs=1), begin(runs, LONG[::-1], None)]
    run(runs, [others[0], *sequences, others[1]], chunk)
    assert len(others[0].prompt_scores) == 6
    for sequence, (prompt, pooling) in zip(sequences, wanted, strict=True):
        with torch.no_grad():
            hidden = oracle.model(torch.tensor([prompt])).last_hidden_state[0].double()
        expected = hidden.mean(0) if pooling is Pooling.MEAN else hidden[-1]
        assert np.abs(embedding(sequence) - expected.numpy()).max() < 1e-5


def test_what_is_computed_again_is_added_once(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = load(tmp_path, page_size=4)
    once, twice = (begin(engine, LONG, Pooling.MEAN) for _ in range(2))
    run(engine, [once], 6)
    engine.step({twice: 8})
    twice.computed = 4  # preempted, and found again in part
    run(engine, [twice], 6)
    assert np.abs(embedding(once) - embedding(twice)).max() < 1e-6


def test_only_the_mean_needs_pages_of_its_own() -> None:
    work = Work(AttemptKey("r", 1), [1], Sampling(), 1, frozenset(), cache_salt="salt")
    last = Work(work.key, [1], Sampling(), 1, frozenset(), cache_salt="salt", pooling=Pooling.LAST)
    mean = Work(work.key, [1], Sampling(), 1, frozenset(), cache_salt="salt", pooling=Pooling.MEAN)
    assert work.cache_name == last.cache_name != mean.cache_name
    assert [work_from(work_to(each)) for each in (work, last, mean)] == [work, last, mean]


async def test_the_client_embeds_texts_and_token_ids() -> None:
    """By a router before workers whose vectors are (3, 4)."""
    async with front_door() as server, AsyncClient(server.address) as client:
        both = await client.embed(["a text", [1, 2]])
        assert [pytest.approx(each) for each in both] == [[0.6, 0.8]] * 2
        assert await client.embed(["a"], pooling="mean", dimensions=1, normalize=False) == [[3.0]]
        for inputs, problem in (([], "inputs must not be empty"), ([[]], "the prompt is empty")):
            with pytest.raises(InvalidRequest, match=problem):
                await client.embed(inputs)
        with pytest.raises(InvalidRequest, match="at most 128"):
            await client.embed(["a"] * 129)


async def test_http_returns_numbers_or_base64_and_refuses_what_is_wrong() -> None:
    async with front_door() as server, httpx.AsyncClient() as http:

        async def post(**body: object) -> httpx.Response:
            return await http.post(f"http://{server.http_address}/v1/embeddings", json=body)

        answer = (await post(input=["a text", "another"], user="me")).json()
        assert [each["index"] for each in answer["data"]] == [0, 1]
        assert answer["data"][1]["embedding"] == pytest.approx([0.6, 0.8])
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 2
        (data,) = (await post(input=[1, 2], encoding_format="base64")).json()["data"]
        assert list(array("f", base64.b64decode(data["embedding"]))) == pytest.approx([0.6, 0.8])
        for body, said in WRONG:
            refused = await post(**body)
            assert (refused.status_code, said in refused.text) == (400, True), refused.text
            assert refused.json()["error"]["param"] in ("input", "pooling", "dimensions")


def test_vectors_are_cut_then_normalized() -> None:
    def shaped(dimensions: int | None = None, *, normalized: bool = True) -> list[float]:
        embedded = EmbeddedInputs(1, dimensions, normalized=normalized)
        embedded.collect(AnswerDelta("", [], 0, embedding=struct.pack("<3f", 3, 4, 12)))
        return embedded.vectors()[0].tolist()

    assert shaped() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert shaped(2) == pytest.approx([0.6, 0.8])
    assert shaped(2, normalized=False) == [3.0, 4.0]
    for dimensions in (0, 4):
        with pytest.raises(InvalidRequest, match="dimensions must be 1 to 3"):
            shaped(dimensions)
    with pytest.raises(Unavailable, match="returned no embedding"):
        EmbeddedInputs(1, None, normalized=True).vectors()

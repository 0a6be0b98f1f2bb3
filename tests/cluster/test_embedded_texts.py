"""Embeddings of the embedded model's first layers, beside transformers'."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import torch
from processes import ProcessCluster
from shallow_model import LAYERS
from transformers import AutoModel, AutoTokenizer

from baton.core.model_store import embedded_folder
from baton.v1 import inference_pb2, inference_pb2_grpc

MODEL = "shallow"
LONG = "A sentence that is repeated until the prompt needs several chunks and pages. " * 42
TEXTS = ["The capital of France is Paris.", "a", LONG]


@pytest.fixture
def http(shallow_idle: ProcessCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{shallow_idle.http}", timeout=120) as client:
        yield client


@cache
def oracle() -> tuple[Any, Any]:
    folder = embedded_folder()
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=LAYERS)
    return AutoTokenizer.from_pretrained(folder), model.eval()


@cache
@torch.inference_mode()
def last_states(text: str) -> torch.Tensor:
    tokenizer, model = oracle()
    states: torch.Tensor = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return states.double()


def expected(text: str, pooling: str) -> np.ndarray[Any, Any]:
    states = last_states(text)
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return np.asarray(pooled / pooled.norm())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(http: httpx.Client, pooling: str) -> None:
    for _ in range(2):  # the second time, some pages are cached
        answer = http.post("/v1/embeddings", json={"input": TEXTS, "pooling": pooling})
        assert answer.status_code == 200, answer.text
        for each, text in zip(answer.json()["data"], TEXTS, strict=True):
            assert np.abs(each["embedding"] - expected(text, pooling)).max() < 1e-5
    tokenizer, _ = oracle()
    assert answer.json()["usage"]["prompt_tokens"] == sum(
        len(tokenizer(t).input_ids) for t in TEXTS
    )


def test_the_sdk_reads_them_and_dimensions_cut_them(shallow_idle: ProcessCluster) -> None:
    whole = expected(TEXTS[0], "last")[:8]
    with shallow_idle.sdk() as sdk:
        # The SDK asks for base64 by itself.
        answer = sdk.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8)
        (found,) = answer.data
        assert np.abs(found.embedding - whole / np.linalg.norm(whole)).max() < 1e-5
        with pytest.raises(openai.BadRequestError, match="dimensions must be 1 to 576"):
            sdk.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=577)


def test_token_ids_and_base64_are_the_same_vectors(http: httpx.Client) -> None:
    tokenizer, _ = oracle()
    ids = tokenizer(TEXTS[0]).input_ids
    body = {"input": [ids], "encoding_format": "base64"}
    (data,) = http.post("/v1/embeddings", json=body).json()["data"]
    values = np.frombuffer(base64.b64decode(data["embedding"]), "<f4")
    assert np.abs(values - expected(TEXTS[0], "last")).max() < 1e-5


def test_grpc_embeds_with_prefill_alone(shallow_idle: ProcessCluster) -> None:
    message = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(text=text) for text in TEXTS[:2]],
        pooling=inference_pb2.POOLING_MEAN,
        unnormalized=True,
        request_id="embedded",
    )
    with grpc.insecure_channel(shallow_idle.address) as channel:
        answer = inference_pb2_grpc.InferenceStub(channel).Embed(message, timeout=60)
    for each, text in zip(answer.embeddings, TEXTS[:2], strict=True):
        vector = np.array(each.values)
        assert np.linalg.norm(vector) > 2.0
        assert np.abs(vector / np.linalg.norm(vector) - expected(text, "mean")).max() < 1e-5
    with shallow_idle.client() as client:
        timing = client.timing("embedded")
    assert [each.decode_worker for each in timing.answers] == ["", ""]


def test_a_cancelled_call_leaves_nothing_behind(shallow_idle: ProcessCluster) -> None:
    inputs = [inference_pb2.EmbedInput(text=LONG + str(place)) for place in range(24)]
    message = inference_pb2.EmbedRequest(inputs=inputs, pooling=inference_pb2.POOLING_MEAN)
    with grpc.insecure_channel(shallow_idle.address) as channel:
        calling = inference_pb2_grpc.InferenceStub(channel).Embed.future(message, timeout=60)
        with shallow_idle.client() as client:
            while not client.status().active_requests:
                time.sleep(0.01)
        assert calling.cancel()
    shallow_idle.wait_idle()

"""Tokens through router, prefill process, NIXL and decode process equal transformers'."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from engine_loop import answer, load
from processes import ProcessCluster
from quantized_models import save_quantized
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save

from baton import InvalidRequest

# Each model with its own page size, chunk size and batch limit, so that all of them are met.
SIZES = [(16, 512, 64), (1, 7, 3), (4, 16, 8), (32, 5, 2), (8, 33, 1)]
# One model of each layout of pages; tests/unit/test_engine_tokens.py runs all models.
LAYOUTS = ["llama", "llama-tied-mqa", "llama-head-dim", "mixtral", "qwen2", "qwen3", "smollm3"]
LAYOUTS += ["mistral-window", "qwen2-layer-types", "qwen3-windows", "phi3", "phi3-long", "gemma3"]
LAYOUTS += ["gpt-oss", "gpt-oss-full", "deepseek-v2-lite", "deepseek-v3-halves"]
LENGTHS = [1, 2, 15, 16, 17, 40, 100]
ANSWER = 18


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


def ask(cluster: ProcessCluster, asked: list[list[int]], tokens: int = ANSWER) -> list[list[int]]:
    """All prompts at once."""
    with cluster.client() as client, ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(lambda p: client.generate(p, max_tokens=tokens, timeout=120), asked)
        return [list(answer.token_ids) for answer in answers]


@pytest.mark.parametrize(("index", "name"), list(enumerate(LAYOUTS)), ids=LAYOUTS)
def test_tokens_equal_transformers(index: int, name: str, tmp_path: Path) -> None:
    oracle = save(TINY_MODELS[name], tmp_path / "model", seed=index)
    asked = prompts(index)
    page_size, chunk, batch = SIZES[index % len(SIZES)]
    tree: dict[str, object] = {
        "page_size": page_size,
        "prefill": {"kv_memory": "4MiB", "chunk_tokens": chunk, "threads": 1},
        "decode": {"kv_memory": "4MiB", "max_batch": batch, "threads": 1},
    }
    with ProcessCluster(tmp_path / "model", tmp_path, tree=tree) as cluster:
        answers = ask(cluster, asked)
        assert {len(answer) for answer in answers} == {ANSWER}
        assert answers == choices_of_transformers(oracle, asked, answers)
        assert ask(cluster, asked[-1:]) == answers[-1:], "with the prompt's pages cached"
        cluster.wait_idle()


def test_a_model_without_a_tokenizer_answers_token_ids_over_http(
    tiny: Path, tmp_path: Path
) -> None:
    tree: dict[str, object] = {
        "prefill": {"kv_memory": "4MiB", "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
    }
    with ProcessCluster(tiny, tmp_path, tree=tree) as cluster:
        (prompt,) = prompts(0)[2:3]
        (expected,) = ask(cluster, [prompt])
        with openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none") as sdk:
            create = partial(
                sdk.completions.create,
                model="",
                prompt=prompt,
                max_tokens=ANSWER,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            (choice,) = create().choices
            chunks = [chunk.choices[0] for chunk in create(stream=True)]
        with cluster.client() as client:
            for text_needed in (lambda: client.detokenize([5]), lambda: client.tokenize("5")):
                with pytest.raises(InvalidRequest, match="this model has no tokenizer"):
                    text_needed()
            with pytest.raises(InvalidRequest, match="no tokenizer, which stop strings need"):
                client.generate(prompt, stop="x")
        with httpx.Client(base_url=f"http://{cluster.http}") as http:
            detokenized = http.post("/detokenize", json={"tokens": [5, 6]})
            stopped = http.post("/v1/completions", json={"prompt": prompt, "stop": ["x"]})
        refused = [each.json()["error"] for each in (detokenized, stopped)]
        assert [(each["param"], each["code"]) for each in refused] == [
            ("tokens", "invalid_request"),
            ("stop", "unsupported_parameter"),
        ]
        assert (choice.text, choice.model_dump()["token_ids"]) == ("", expected)
        streamed = [token for each in chunks for token in each.model_dump()["token_ids"]]
        assert streamed == expected
        assert len(chunks) > 2


@pytest.mark.parametrize(("name", "quantized"), [("llama", "gptq"), ("deepseek-v3", "fp8")])
def test_tokens_of_a_quantized_checkpoint_equal_transformers(
    name: str, quantized: str, tmp_path: Path
) -> None:
    """With the numbers that its codes stand for; prefill has two ranks, decode one."""
    oracle = save_quantized(quantized, tmp_path / "model", TINY_MODELS[name])
    tree: dict[str, object] = {
        "prefill": {"kv_memory": "4MiB", "threads": 1, "tensor_parallel": 2},
        "decode": {"kv_memory": "4MiB", "threads": 1},
    }
    with ProcessCluster(tmp_path / "model", tmp_path, tree=tree) as cluster:
        answers = ask(cluster, prompts(0))
        assert {len(answer) for answer in answers} == {ANSWER}
        assert answers == choices_of_transformers(oracle, prompts(0), answers)
        cluster.wait_idle()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_tokens_over_pages_of_codes_are_those_of_one_engine(kv_dtype: str, tmp_path: Path) -> None:
    """Through prefill, transfer and decode, with pages of windows and without, found again in
    both caches, and after the decode worker was lost."""
    save(TINY_MODELS["gemma2"], tmp_path / "model")
    engine = load(tmp_path / "model", kv_dtype=kv_dtype)
    expected = [answer(engine, prompt, ANSWER) for prompt in prompts(0)]
    tree: dict[str, object] = {
        "kv_dtype": kv_dtype,
        "page_size": 4,
        "cache": {"host_memory": "1MiB"},
        "prefill": {"kv_memory": "4MiB", "chunk_tokens": 16, "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
    }
    with ProcessCluster(tmp_path / "model", tmp_path, tree=tree) as cluster:
        for _ in range(2):
            assert ask(cluster, prompts(0)) == expected
        assert {worker.kv_dtype for worker in cluster.wait_idle()} == {kv_dtype}
        cluster.workers["decode-0"].kill()
        cluster.restart("decode-0")
        assert ask(cluster, prompts(0)) == expected
        cluster.wait_idle()


def test_tokens_of_a_model_in_int8_are_those_of_one_engine(tmp_path: Path) -> None:
    save(TINY_MODELS["qwen3-moe"], tmp_path / "model")
    engine = load(tmp_path / "model", quantization="int8")
    asked = [prompt for prompt in prompts(0) if len(prompt) in (1, 16, 17, 40)]
    expected = [answer(engine, prompt, 12) for prompt in asked]
    tree: dict[str, object] = {
        "quantization": "int8",
        "prefill": {"kv_memory": "4MiB", "chunk_tokens": 16, "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 2},
    }
    with ProcessCluster(tmp_path / "model", tmp_path, tree=tree) as cluster:
        assert ask(cluster, asked, 12) == expected
        assert {worker.quantization for worker in cluster.wait_idle()} == {"int8"}
        for worker in cluster.workers.values():
            assert "loading the model in float32, " in worker.log
            assert "; int8 weights multiplied by" in worker.log

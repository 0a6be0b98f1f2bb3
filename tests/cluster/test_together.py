"""Capabilities together: a seed draws a family, its weights and their quantization, sizes of pages
and chunks, ranks, a second tier, speculation, and what happens to a worker while requests run.

Greedy answers are those of transformers, or of one engine with the same quantization; drawn ones
are the same when nothing happens. What is refused together (docs/MODELS.md) is not drawn: a
quantized model among workers of which one has several ranks. More seeds:
BATON_TOGETHER_SEEDS=0:1000 python -m pytest tests/cluster/test_together.py
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from engine_loop import answer, load
from processes import ProcessCluster
from quantized_models import save_quantized
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save
from transformers import PreTrainedModel
from waiting import until

from baton import AsyncClient

FIRST, END = map(int, os.environ.get("BATON_TOGETHER_SEEDS", "0:4").split(":"))
# In turn, so that few seeds meet what pages differ in: windows, latents, sinks, plain heads.
FAMILIES = ["gpt-oss", "deepseek-v2", "gemma3", "olmo2", "qwen2-moe", "phi3-partial", "llama"]
FAMILIES += ["deepseek-v3", "mistral-window", "granite", "qwen3-moe", "gemma2", "dots1", "smollm3"]
ONE_KEY_HEAD = ("gemma3",)
QUANTIZED = {"llama": "gptq", "deepseek-v3": "fp8"}
EVENTS = ["the decode worker is lost", "the prefill worker is lost", "a role switch"]
ANSWER = 40

Request = tuple[list[int], int | None]
"""A prompt, and the seed of a drawn answer."""

Answers = list[list[int]]


@dataclass(frozen=True)
class Drawn:
    family: str
    quantized: str
    event: str
    tree: dict[str, object]
    split: dict[str, dict[str, object]]  # the worker that several ranks share
    requests: list[Request]

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(seed)
        family = FAMILIES[seed % len(FAMILIES)]
        sections: dict[str, dict[str, object]] = {
            role: {"kv_memory": "4MiB", "threads": 1} for role in ("prefill", "decode")
        }
        sections["prefill"]["chunk_tokens"] = draw.choice([5, 16, 33, 512])
        sections["decode"]["max_batch"] = draw.choice([2, 8, 64])
        tree: dict[str, object] = {"page_size": draw.choice([1, 4, 8, 16]), **sections}
        if draw.random() < 0.5:
            tree["cache"] = {"host_memory": "1MiB"}
        split: dict[str, dict[str, object]] = {}
        role = draw.choice(["", "prefill", "decode"])
        if role and family not in ONE_KEY_HEAD:
            split[f"{role}-0"] = {role: {**sections[role], "tensor_parallel": 2}}
        quantized = QUANTIZED.get(family, "") if draw.random() < 0.5 else ""
        event = EVENTS[seed % len(EVENTS)]
        requests = _requests(draw)
        tree["speculation"] = draw.choice(["off", "ngram"])
        tree["quantization"] = draw.choice(["int8", "none", "int8"]) if not split else "none"
        return cls(family, quantized, event, tree, split, requests)

    def save(self, folder: Path) -> PreTrainedModel:
        model = TINY_MODELS[self.family]
        return (
            save_quantized(self.quantized, folder, model) if self.quantized else save(model, folder)
        )

    def expected(
        self, folder: Path, oracle: PreTrainedModel, prompts: list[list[int]], found: Answers
    ) -> Answers:
        if self.tree["quantization"] == "none":
            return choices_of_transformers(oracle, prompts, found)
        engine = load(folder, quantization=str(self.tree["quantization"]))
        return [answer(engine, prompt, ANSWER) for prompt in prompts]


def _requests(draw: random.Random) -> list[Request]:
    """Some begin as others do."""
    first = [draw.randrange(VOCABULARY) for _ in range(60)]
    prompts = [first[: draw.randrange(61)] for _ in range(6)]
    prompts = [[*p, *(draw.randrange(VOCABULARY) for _ in range(20))] for p in prompts]
    return [(prompt, draw.choice([None, None, index])) for index, prompt in enumerate(prompts)]


async def ask(client: AsyncClient, request: Request) -> list[int]:
    prompt, seed = request
    drawn = {} if seed is None else {"temperature": 0.8, "top_p": 0.9, "seed": seed}
    answer = await client.generate(prompt, max_tokens=ANSWER, ignore_eos=True, timeout=120, **drawn)
    return list(answer.token_ids)


async def is_busy(client: AsyncClient) -> bool:
    return any(worker.load.running for worker in (await client.status()).workers)


async def happen(event: str, cluster: ProcessCluster, client: AsyncClient) -> None:
    if event == "a role switch":
        for role in ("prefill", "decode"):
            await client.switch_role("decode-1", role)
        return
    name = "decode-1" if "decode" in event else "prefill-0"
    cluster.workers[name].kill()
    await asyncio.to_thread(cluster.restart, name)


@pytest.mark.parametrize("seed", range(FIRST, END))
async def test_capabilities_together_answer_as_alone(seed: int, tmp_path: Path) -> None:
    drawn = Drawn.of(seed)
    oracle, asked = drawn.save(tmp_path / "model"), drawn.requests
    with ProcessCluster(
        tmp_path / "model", tmp_path, decode=2, tree=drawn.tree, per_worker=drawn.split
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            answers = await asyncio.gather(*(ask(client, request) for request in asked))
            again = asyncio.gather(*(ask(client, request) for request in asked))
            await until(partial(is_busy, client), pause=0.005)
            await happen(drawn.event, cluster, client)
            assert await again == answers, drawn
        assert {len(answer) for answer in answers} == {ANSWER}
        greedy = [place for place, (_, drawn_by) in enumerate(asked) if drawn_by is None]
        prompts, found = [asked[place][0] for place in greedy], [answers[place] for place in greedy]
        assert found == drawn.expected(tmp_path / "model", oracle, prompts, found), drawn
        cluster.wait_idle()

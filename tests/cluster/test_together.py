"""Capabilities together: a seed draws a family, its weights and their quantization, that of pages,
sizes of pages and chunks, ranks, a second tier, speculation, an adapter, and what happens to a
worker while requests run.

Greedy answers are those of transformers, or of one engine with the same quantization; drawn ones
are the same when nothing happens. What is refused together (docs/MODELS.md) is not drawn: a
quantized model among workers of which one has several ranks, and pages of codes of latents. Nor
are pages of codes with several ranks: their sums differ in the last bits, codes by more. More
seeds:
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
from adapters import save_adapter
from draft_models import save_draft
from engine_loop import answer, load
from processes import ProcessCluster
from quantized_models import save_quantized
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save
from transformers import PreTrainedModel
from waiting import until

from baton import AsyncClient
from baton.core.adapter_store import find_adapter

FIRST, END = map(int, os.environ.get("BATON_TOGETHER_SEEDS", "0:4").split(":"))
# In turn, so that few seeds meet what pages differ in: windows, latents, sinks, plain heads.
FAMILIES = ["gpt-oss", "deepseek-v2", "gemma3", "olmo2", "qwen2-moe", "phi3-partial", "llama"]
FAMILIES += ["deepseek-v3", "mistral-window", "granite", "qwen3-moe", "gemma2", "dots1", "smollm3"]
ONE_KEY_HEAD = ("gemma3",)
INT4 = ["gpt-oss", "gemma3", "qwen3-moe", "gemma2"]
"""Families whose heads, a multiple of 8, may be kept so."""

QUANTIZED = {"llama": "gptq", "deepseek-v3": "fp8"}
EVENTS = ["the decode worker is lost", "the prefill worker is lost", "a role switch"]
ANSWER = 40

Request = tuple[list[int], int | None, str]
"""A prompt, the seed of a drawn answer, and the adapter's name."""

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
        tree["speculation"] = draw.choice(["off", "ngram", "draft"])
        tree["quantization"] = draw.choice(["int8", "none", "int4"]) if not split else "none"
        if draw.random() < 0.7 and "deepseek" not in family:
            requests = [(*each[:2], "lora" * draw.randrange(2)) for each in requests]
        coded = draw.choice(["int4" if family in INT4 else "int8", "int8", "auto"])
        tree["kv_dtype"] = "auto" if split or "deepseek" in family else coded
        return cls(family, quantized, event, tree, split, requests)

    def save(self, folder: Path) -> dict[str, PreTrainedModel]:
        """The model, and it with the adapter, by the names that requests give."""
        model = TINY_MODELS[self.family]
        base = (
            save_quantized(self.quantized, folder, model) if self.quantized else save(model, folder)
        )
        if self.tree["speculation"] == "draft":
            save(model, folder / "same")
            self.tree["draft_model"] = str(save_draft(folder / "same", folder / "draft", 0.01))
        if not any(adapter for _, _, adapter in self.requests):
            return {"": base}
        self.tree["adapters"] = {"lora": str(folder / "lora")}
        return {"": base, "lora": save_adapter(base, folder / "lora", target_modules=["o_proj"])}

    def expected(
        self,
        folder: Path,
        oracles: dict[str, PreTrainedModel],
        requests: list[Request],
        found: Answers,
    ) -> Answers:
        kept = {key: str(self.tree[key]) for key in ("quantization", "kv_dtype")}
        if list(kept.values()) == ["none", "auto"]:
            pairs = zip(requests, found, strict=True)
            return [
                choices_of_transformers(oracles[model], [prompt], [one])[0]
                for (prompt, _, model), one in pairs
            ]
        engine, adapter = load(folder, **kept), None
        if "lora" in oracles:
            adapter = find_adapter(str(folder / "lora"))
            engine.open_adapters(1, [str(folder)], lambda: None).load_now(adapter)
        return [
            answer(engine, prompt, ANSWER, adapter if model else None)
            for prompt, _, model in requests
        ]


def _requests(draw: random.Random) -> list[Request]:
    """Some begin as others do."""
    first = [draw.randrange(VOCABULARY) for _ in range(60)]
    prompts = [first[: draw.randrange(61)] for _ in range(6)]
    prompts = [[*p, *(draw.randrange(VOCABULARY) for _ in range(20))] for p in prompts]
    return [(prompt, draw.choice([None, None, index]), "") for index, prompt in enumerate(prompts)]


async def ask(client: AsyncClient, request: Request) -> list[int]:
    prompt, seed, model = request
    drawn = {} if seed is None else {"temperature": 0.8, "top_p": 0.9, "seed": seed}
    answer = await client.generate(
        prompt, model=model, max_tokens=ANSWER, ignore_eos=True, timeout=120, **drawn
    )
    return list(answer.token_ids)


async def is_busy(client: AsyncClient) -> bool:
    """As the router counts, which is at once; a worker's load waits for its next report."""
    return any(worker.active_requests for worker in (await client.status()).workers)


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
    oracles, asked = drawn.save(tmp_path / "model"), drawn.requests
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
        greedy = [place for place, (_, drawn_by, _) in enumerate(asked) if drawn_by is None]
        found = [answers[place] for place in greedy]
        wanted = drawn.expected(
            tmp_path / "model", oracles, [asked[place] for place in greedy], found
        )
        assert found == wanted, drawn
        cluster.wait_idle()

"""The defaults of a model's generation_config.json, through the whole path: as transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from processes import ProcessCluster
from streams import begin
from text_model import END, save_text_model, tokenizer
from tiny_models import generate_with_transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from baton import AsyncClient

ANSWER = 40
WORDS = tokenizer()
SECTION = {"kv_memory": "4MiB", "threads": 1}
TREE: dict[str, object] = {"prefill": SECTION, "decode": SECTION}


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(draw.randint(2, 60))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose defaults all change its greedy answers."""
    made = tmp_path_factory.mktemp("defaults")
    save_text_model(made)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    plain = [generate_with_transformers(model, prompt, 8) for prompt in prompts(10)]
    first, second, third, fourth = (plain[index][index] for index in range(4))
    model.generation_config = GenerationConfig(
        repetition_penalty=1.1,
        no_repeat_ngram_size=3,
        min_new_tokens=9,
        suppress_tokens=[second, third],
        begin_suppress_tokens=[first],
        bad_words_ids=[[fourth], plain[5][3:5], [WORDS.token_to_id(END)]],
        eos_token_id=[WORDS.token_to_id(END), plain[6][4]],
        do_sample=False,
    )
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def expected(oracle: PreTrainedModel, prompt: list[int], **own: Any) -> list[int]:
    """What transformers answers with the folder's defaults, and the request's `own` values."""
    answer = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        **{"max_new_tokens": ANSWER, "pad_token_id": 0, **own},
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


OWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "other values": {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2},
    "no penalties": {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    "other bans": {"suppress_tokens": [3], "bad_words_ids": [[4, 5]]},
}


async def test_answers_equal_transformers_where_requests_leave_values_out(
    folder: Path, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    """Also in a pool so small that requests are preempted, and with values of a request's own."""
    asked = [(prompt, own) for prompt in prompts(3) for own in OWN.values()]
    wanted = [expected(oracle, prompt, **own) for prompt, own in asked]
    assert len({len(answer) for answer in wanted}) > 2
    assert min(map(len, wanted)) >= 9
    tree = TREE | {"decode": {"kv_memory": "200KiB", "threads": 1}}
    with ProcessCluster(folder, tmp_path, tree=tree) as cluster:
        async with AsyncClient(cluster.address) as client:
            answers = await asyncio.gather(
                *(client.generate(prompt, max_tokens=ANSWER, **own) for prompt, own in asked)
            )
        assert [list(answer.token_ids) for answer in answers] == wanted
        async with httpx.AsyncClient(base_url=f"http://{cluster.http}", timeout=60) as http:
            for (prompt, own), tokens in list(zip(asked, wanted, strict=True))[:8]:
                body = {"prompt": prompt, "max_tokens": ANSWER, **own}
                (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
                ended = tokens[-1] in oracle.generation_config.eos_token_id
                assert choice["text"] == WORDS.decode(tokens[:-1] if ended else tokens)
        log = cluster.router.wait_for(r"the defaults of \S+ for requests: (.*)")
        assert log.startswith("repetition_penalty 1.1, no_repeat_ngram_size 3, suppress_tokens (2)")
        cluster.wait_idle()


async def test_an_answer_that_migrates_keeps_to_the_defaults(
    folder: Path, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    prompt = prompts(1)[0]
    wanted = expected(oracle, prompt, max_new_tokens=250, min_new_tokens=250)
    with ProcessCluster(folder, tmp_path, decode=2, tree=TREE) as cluster:
        async with AsyncClient(cluster.address) as client:
            stream, busy = await begin(client, prompt, max_tokens=250, min_tokens=250)
            cluster.workers.pop(busy).kill()
            answer = await stream.read()
        assert len(answer.placements) == 2
        assert list(answer.token_ids) == wanted


async def test_defaults_can_be_switched_off(folder: Path, tmp_path: Path) -> None:
    """All but the end tokens, which the model still has."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends)
    tree = TREE | {"router": {"generation_config": "none"}}
    with ProcessCluster(folder, tmp_path, tree=tree) as cluster:
        async with AsyncClient(cluster.address) as client:
            for prompt in prompts(4):
                answer = await client.generate(prompt, max_tokens=20)
                assert list(answer.token_ids) == expected(model, prompt, max_new_tokens=20)

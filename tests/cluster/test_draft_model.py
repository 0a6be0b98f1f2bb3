"""A cluster with a draft model answers as one without speculation, and what it accepts does not
depend on where a prompt's pages come from.

The draft is the model without layers that add nothing: in one engine all its guesses are right
(tests/unit/test_drafts.py), and so they must be in a cluster, within 2%.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from draft_models import deepen, save_draft
from processes import ProcessCluster, scrape
from text_model import save_text_model

from baton import Answer, AsyncClient
from baton.core import metrics
from baton.core.config import Config, Size
from baton.core.errors import InvalidConfig, ModelNotFound
from baton.engine.draft_model import find_draft, load_draft
from baton.engine.engine import Engine

PAGE = 4
PROMPTS = ["name 12 the true name" * 20, "the null 12 " * 6, "false" * 30, '{"name": "12"}' * 30]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
OPTIONS: list[dict[str, object]] = [
    {"ignore_eos": True},
    {"temperature": 0.9, "seed": 4, "logit_bias": {5: 3.0}, "n": 2},
    {"temperature": 0.7, "seed": 1, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "json_schema": SCHEMA},
    {"ignore_eos": True, "stop": ["a", "1"], "temperature": 1.0, "seed": 5},
]
TOKENS, LONG = 32, 250


def tree(pages: int, **changes: object) -> dict[str, object]:
    return {
        "page_size": PAGE,
        **{
            role: {"kv_memory": pages * PAGE * 24 * 2 * 24 * 4, "threads": 1}
            for role in ("prefill", "decode")
        },
        **changes,
    }


async def ask_in_turn(client: AsyncClient) -> list[Answer]:
    """Answers in which little repeats, so that the draft guesses."""
    return [
        await client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **drawn)  # type: ignore[arg-type]
        for prompt in PROMPTS
        for drawn in ({"temperature": 1.0, "seed": 3}, {"temperature": 1.2, "seed": 4})
    ]


async def ask_all(client: AsyncClient) -> list[Answer]:
    """Each prompt in each way, all at once."""
    asked = [
        client.generate(prompt, max_tokens=TOKENS, **options)  # type: ignore[arg-type]
        for prompt in PROMPTS
        for options in OPTIONS
    ]
    return list(await asyncio.gather(*asked))


def contents(answers: list[Answer]) -> list[object]:
    return [
        (choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop)
        for each in answers
        for choice in each.choices
    ]


def check_acceptance(cluster: ProcessCluster) -> None:
    """Of the guesses of the draft alone, on all decode workers."""
    cluster.wait_idle()
    names = [name for name in cluster.workers if name.startswith("decode")]
    guesses, right = (
        sum(cluster.metric(name, metric) for name in names)
        for metric in (metrics.DRAFT_GUESSES, metrics.DRAFT_RIGHT)
    )
    assert guesses > 0
    assert right >= 0.98 * guesses, (right, guesses)


def restored_pages(cluster: ProcessCluster, worker: str) -> float:
    """That came back from host memory."""
    cluster.wait_idle()
    found = scrape(cluster.workers[worker].wait_for(r"metrics on (\S+)"), label="event")
    return found.get(f"{metrics.TIER_EVENTS} restored", 0.0)


async def busy(client: AsyncClient) -> list[str]:
    """The decode workers with requests."""
    workers = (await client.status()).workers
    names = [each.member.worker_id for each in workers if each.active_requests]
    return [name for name in names if name.startswith("decode")]


async def migrated(client: AsyncClient, cluster: ProcessCluster) -> None:
    """A long answer whose worker is lost before its end, and the same again."""

    async def ask() -> Answer:
        return await client.generate(
            PROMPTS[1], max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=3
        )

    running = asyncio.create_task(ask())
    names: list[str] = []
    while not names:
        names = await busy(client)
    cluster.workers[names[0]].kill()
    answer = await running
    await asyncio.to_thread(cluster.restart, names[0])
    assert len(answer.placements) > 1
    assert contents([answer]) == contents([await ask()])


async def test_answers_and_acceptance_are_the_same_whatever_happens(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_text_model(model)
    draft = save_draft(model, tmp_path / "draft")
    deepen(model, 21)
    with ProcessCluster(model, tmp_path / "off", tree=tree(2000)) as plain:
        async with AsyncClient(plain.address) as client:
            expected = contents(await ask_all(client))
    changes = {"speculation": "draft", "draft_model": str(draft)}
    tier = {"cache": {"host_memory": "64MiB"}}
    # Less than what runs at once, so requests are preempted and pages evicted.
    with ProcessCluster(
        model, tmp_path / "on", prefill=2, decode=2, tree=tree(130, **changes, **tier)
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            for case in ("fresh", "with cached prefixes"):
                await ask_in_turn(client)
                check_acceptance(cluster)
                assert contents(await ask_all(client)) == expected, case
                check_acceptance(cluster)
            await migrated(client, cluster)
            check_acceptance(cluster)
            await client.switch_role("prefill-1", "decode")
            assert contents(await ask_all(client)) == expected, "with a third decode worker"
            check_acceptance(cluster)


async def test_acceptance_is_the_same_out_of_the_second_tier(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_text_model(model)
    draft = save_draft(model, tmp_path / "draft")
    deepen(model, 21)
    changes = {
        "speculation": "draft",
        "draft_model": str(draft),
        "draft_kv_memory": "64MiB",
        "router": {"local_prefill": "never"},
        "cache": {"host_memory": "64MiB"},
    }
    # Holds one request at a time, so each evicts the pages of the one before.
    with ProcessCluster(model, tmp_path / "on", tree=tree(80, **changes)) as cluster:
        async with AsyncClient(cluster.address) as client:
            first = contents(await ask_in_turn(client))
            before = restored_pages(cluster, "decode-0")
            assert contents(await ask_in_turn(client)) == first
        check_acceptance(cluster)
        assert restored_pages(cluster, "decode-0") > before


def test_a_draft_of_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    save_draft(tmp_path / "model", tmp_path / "other")
    text = (tmp_path / "other" / "tokenizer.json").read_text()
    (tmp_path / "other" / "tokenizer.json").write_text(text.replace("<|end|>", "<|stop|>"))
    save_draft(tmp_path / "model", tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()

    def find(speculation: str, draft: str) -> None:
        config = Config(speculation=speculation, draft_model=draft)  # type: ignore[arg-type]
        find_draft(config, tmp_path / "model", weights=True)

    find("ngram", "")
    find("draft", str(tmp_path / "model"))
    for name in ("other", "bare"):
        with pytest.raises(InvalidConfig, match=f"{name} has another vocabulary") as refused:
            find("draft", str(tmp_path / name))
        assert refused.value.field == "draft_model"
    for speculation, draft in (("draft", ""), ("ngram", "a"), ("off", "a")):
        with pytest.raises(InvalidConfig, match="needs a draft_model"):
            find(speculation, draft)
    engine = Engine.load(tmp_path / "model", kv_memory=1 << 20)
    small = Config(speculation="draft", draft_model="a", draft_kv_memory=Size(100))
    with pytest.raises(InvalidConfig, match="hold no page") as too_small:
        load_draft(small, tmp_path / "model", engine)
    assert too_small.value.field == "draft_kv_memory"
    with pytest.raises(ModelNotFound) as missing:
        find("draft", str(tmp_path / "nowhere"))
    assert missing.value.field == "draft_model"

"""A draft model on a GPU changes no answer: tokens and log probabilities are those without, bit for
bit, whether its guesses are right or wrong, while steps run ahead or wait."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_models import Drafting, deepen, save_draft
from pools import CUDA
from processes import ProcessCluster
from random_schemas import random_schema
from random_shapes import SHAPES, VOCABULARY, load_on_gpu
from speculating import KEY, SAMPLINGS, Loop, works
from text_model import END, save_text_model, tokenizer
from tiny_models import TINY_MODELS, generate_with_transformers, save

from baton import AsyncClient
from baton.core import metrics
from baton.core.config import Config, with_device_defaults
from baton.core.types import Structure, Work
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import Speculation
from baton.engine.draft_model import MOST_BEHIND, draft_settings, load_draft
from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings
from baton.engine.gpu.draft_room import draft_room
from baton.engine.model_choice import KvDtype
from baton.router.prompts.output_grammar import grammar_of

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

MAIN = GpuSettings(max_batch=24, chunk_tokens=512, guesses=True)
DRAFT = GpuSettings(max_batch=24, chunk_tokens=512, guesses=True, short_chunk=MOST_BEHIND)
CASES: list[tuple[str, KvDtype]] = [
    ("small", "auto"),
    ("mistral", "int8"),
    ("small", "int4"),
    ("gemma3", "auto"),
    ("qwen3-moe", "auto"),
    ("deepseek-v3", "auto"),
]


def load(name: str, folder: Path, gpu: GpuSettings, kv_dtype: KvDtype, **changes: int) -> Engine:
    folder.mkdir()
    engine = load_on_gpu(name, folder, gpu, kv_dtype, **changes)
    engine.pool.root = b"root"
    return engine


@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_any_model_and_sampling_answers_as_without(
    name: str, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    engine = load(name, tmp_path / "main", MAIN, kv_dtype)
    same = load(name, tmp_path / "same", DRAFT, kv_dtype)
    other = load("small", tmp_path / "other", DRAFT, kv_dtype, num_hidden_layers=2)
    asked = works(SAMPLINGS)
    plain = [Loop(engine).answer([each])[0] for each in asked]
    for attempt in ("computed", "cached"):
        loop = Drafting(engine, same, max_batch=24)
        assert loop.answer(asked) == plain, attempt
        assert loop.drafts.right == loop.drafts.compared > len(asked) * 10, attempt
        assert loop.accepted, attempt
    wrong = Drafting(engine, other, max_batch=24)
    assert wrong.answer(asked) == plain
    assert wrong.drafts.compared > wrong.drafts.right
    for draft in (same, other):  # at costs that are measured
        drafts = Drafts(draft, VOCABULARY, 64)
        drafts.rehearse()
        assert not drafts.check()
        assert Loop(engine, Speculation(drafts, runs_ahead=True)).answer(asked) == plain


def test_preempted_requests_and_a_full_pool_of_the_draft_answer_as_without(tmp_path: Path) -> None:
    engine = load("small", tmp_path / "main", MAIN, "auto")
    draft = load("small", tmp_path / "draft", DRAFT, "auto")
    asked = works(SAMPLINGS)
    plain = [Loop(engine).answer([each])[0] for each in asked]
    with engine.pool.lease([], engine.pool.free - 12):
        loop = Drafting(engine, draft, max_batch=24)
        assert loop.answer(asked) == plain
    assert loop.preempted
    assert loop.accepted
    with draft.pool.lease([], draft.pool.free - 6):
        drafts = Drafts(draft, VOCABULARY, 64)
        loop = Loop(engine, Speculation(drafts, runs_ahead=True), max_batch=24)
        assert loop.answer(asked) == plain


def test_answers_with_a_grammar_are_as_without(tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    save_draft(tmp_path / "model", tmp_path / "draft", 0.02)
    engine, same, other = (
        Engine.load(tmp_path / name, device="cuda", kv_memory=64 << 20, gpu=gpu)
        for name, gpu in (("model", MAIN), ("model", DRAFT), ("draft", DRAFT))
    )
    stops = frozenset({tokenizer().token_to_id(END)})
    draw = random.Random(0)
    grammars = [
        grammar_of(Structure("json_schema", json.dumps(random_schema(draw)))) for _ in SAMPLINGS
    ]
    asked = [
        Work(KEY, [3, 50, 7], sampling, 60, stops, grammar=grammar)
        for sampling, grammar in zip(SAMPLINGS, grammars, strict=True)
    ]
    plain = [Loop(engine).answer([each])[0] for each in asked]
    for draft in (same, other):
        loop = Drafting(engine, draft, max_batch=24)
        assert loop.answer(asked) == plain
        assert loop.accepted


def test_the_main_model_leaves_room_for_the_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-8b"]))
    config = with_device_defaults(
        Config(speculation="draft", weights="random", max_context=2048), "cuda"
    )
    share = 0.2
    main = GpuSettings(memory_share=share, max_batch=256, chunk_tokens=2048, guesses=True)
    room = draft_room(config, tmp_path, torch.bfloat16, main)
    torch.cuda.empty_cache()
    engine = Engine.load(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        random_weights=True,
        kv_memory=0,
        max_context=2048,
        gpu=replace(main, draft=room),
    )
    before = torch.cuda.memory_allocated()
    engine.draft = load_draft(config, tmp_path, engine)
    assert engine.draft.gpu == draft_settings(config, engine.gpu)
    assert engine.draft.pool.total >= engine.pool.total - 1
    pages = engine.draft.kv.nbytes
    assert torch.cuda.memory_allocated() - before <= room.fixed + pages
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.memory_reserved() <= share * total
    asked = works(SAMPLINGS)
    plain = Loop(engine).answer(asked)
    assert Drafting(engine, engine.draft).answer(asked) == plain


async def test_a_cluster_answers_as_transformers_while_roles_are_switched(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama-head-dim"], tmp_path / "model")
    draft = save_draft(tmp_path / "model", tmp_path / "draft", 0.01)
    deepen(tmp_path / "model", 24)
    draw = random.Random(5)
    prompts = [[draw.randrange(100) for _ in range(length)] for length in (1, 16, 17, 60, 100, 150)]
    expected = [generate_with_transformers(oracle, each, 40) for each in prompts]
    tree: dict[str, object] = {
        "prefill": {"kv_memory": "16MiB"},
        "decode": {"kv_memory": "16MiB"},
        "drain_seconds": 10.0,
        "speculation": "draft",
        "draft_model": str(draft),
        "ranks_share_gpus": True,
    }
    split = {"decode-0": {"decode": {"kv_memory": "16MiB", "tensor_parallel": 2}}}
    with ProcessCluster(
        tmp_path / "model", tmp_path / "cluster", prefill=2, tree=tree, per_worker=split
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            for role in ("decode", "prefill", "decode"):
                loads = [client.generate(each, max_tokens=40, timeout=200) for each in prompts * 3]
                _, *answers = await asyncio.gather(client.switch_role("prefill-1", role), *loads)
                assert [list(each.token_ids) for each in answers] == expected * 3
        cluster.wait_idle()
        guesses = [cluster.metric(name, metrics.DRAFT_GUESSES) for name in cluster.workers]
    assert sum(guesses) > 0

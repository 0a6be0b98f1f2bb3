"""A model of five layers with a window to one without, in whole clusters: tokens equal
transformers', cached or not, in full pools, and when a worker is lost."""

from __future__ import annotations

import random
from pathlib import Path

from processes import ProcessCluster
from streams import begin
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save

from baton import AsyncClient

LOCAL, GLOBAL = "sliding_attention", "full_attention"
MODEL = TINY_MODELS["gemma3"].changed(
    num_hidden_layers=6, layer_types=[LOCAL] * 5 + [GLOBAL], max_position_embeddings=1024
)
PAGE_BYTES = 2 * 4 * 256 * 4
"""Of one layer: a head of 256 values, 4 tokens, float32."""


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def tree(pages: int, **more: object) -> dict[str, object]:
    memory = f"{pages * PAGE_BYTES}"
    return {
        "page_size": 4,
        "prefill": {"kv_memory": memory, "chunk_tokens": 32, "threads": 1},
        "decode": {"kv_memory": memory, "chunk_tokens": 32, "threads": 1},
        **more,
    }


async def test_turns_of_long_conversations_fit_into_a_fifth_of_the_pages(tmp_path: Path) -> None:
    """440 tokens take 110 pages of the layer without a window; alike, all layers would take 660."""
    oracle = save(MODEL, tmp_path / "model")
    configured = tree(pages=160, cache={"host_memory": f"{600 * PAGE_BYTES}"})
    with ProcessCluster(tmp_path / "model", tmp_path, tree=configured) as cluster:
        async with AsyncClient(cluster.address) as client:
            cached = 0
            for length in (300, 330):  # the second evicts the first, or most of it
                prompt = prompt_of(length)
                for _ in range(3):
                    answer = await client.generate(prompt, max_tokens=16, timeout=60)
                    found = list(answer.token_ids)
                    assert len(found) == 16
                    assert [found] == choices_of_transformers(oracle, [prompt], [found])
                    cached += answer.usage.cached_tokens
                    prompt = [*prompt, *found, *prompt_of(20)]
            assert cached > 600
        cluster.wait_idle()


async def test_an_answer_goes_on_elsewhere_when_its_worker_is_lost(tmp_path: Path) -> None:
    oracle = save(MODEL, tmp_path / "model")
    prompt = prompt_of(200)
    configured = tree(pages=400)
    with ProcessCluster(tmp_path / "model", tmp_path, decode=2, tree=configured) as cluster:
        async with AsyncClient(cluster.address) as client:
            stream, answering = await begin(client, prompt, max_tokens=200, ignore_eos=True)
            cluster.workers.pop(answering).kill()
            answer = await stream.read()
        found = list(answer.token_ids)
        assert len(found) == 200
        assert [found] == choices_of_transformers(oracle, [prompt], [found])
        assert len(answer.placements) == 2

"""Native models on a GPU, in float32: their tokens are transformers' there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_loop import serve
from pools import CUDA
from tiny_models import TINY_MODELS, VOCABULARY, TinyModel, generate_with_transformers, save

from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

ANSWER = 24
NAMES = (
    "granite",
    "olmo2",
    "phi3-long",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "dots1",
    "gpt-oss",
)
MODELS = {name: TINY_MODELS[name] for name in NAMES} | {
    "wide-heads": TinyModel("llama", {"head_dim": 128})
}


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (1, 5, 23, 40, 150)]
    oracle = save(MODELS[name], tmp_path).to("cuda")
    expected = [generate_with_transformers(oracle, prompt, ANSWER) for prompt in prompts]
    engine = Engine.load(tmp_path, device="cuda", kv_memory=64 << 20, gpu=GpuSettings(max_batch=8))
    for chunk in (7, 200):
        assert serve(engine, prompts, ANSWER, chunk) == expected, chunk
    assert engine.pool.free == engine.pool.total

"""A whole model in FP8 on a GPU, beside one whose products are the definition (kernels/fp8.py)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import CUDA
from tiny_models import TINY_MODELS, save

from baton.engine import engine as engine_module
from baton.engine.engine import Engine
from baton.engine.quality import score

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

TOKENS = random.Random(1).choices(range(199), k=200)


def logprobs(folder: Path, **kept: Any) -> torch.Tensor:
    engine = Engine.load(folder, kv_memory=64 << 20, **kept)
    return torch.tensor([each.logprob for each in score(engine, TOKENS)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_model_loses_what_the_definition_loses(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(TINY_MODELS[family], tmp_path)
    found = logprobs(tmp_path, device="cuda", dtype="bfloat16", quantization="fp8")
    plain = logprobs(tmp_path)
    monkeypatch.setattr(engine_module, "check_quantization", lambda *_: None)
    monkeypatch.setattr(engine_module, "check_codes", lambda *_: None)
    defined = logprobs(tmp_path, quantization="fp8")
    lost = (defined - plain).norm()
    # Not the same numbers: rounded to bfloat16, some have the next code.
    assert 0.5 * lost < (found - plain).norm() < 1.4 * lost

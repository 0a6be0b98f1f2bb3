"""Steps are recorded beside pages that hold what is cached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pools import CUDA
from tiny_models import TINY_MODELS, save

from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")


def test_steps_are_recorded_anew_without_touching_a_page_in_use(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = Engine.load(tmp_path, kv_memory=1 << 22, device="cuda")
    # All but what a rehearsal of the largest step needs.
    held = engine.pool.acquire(engine.pool.total - engine.pool.pages_for(engine.context_length))
    engine.kv.normal_()
    before = engine.kv[held.pages].clone()
    engine.reconfigure(1, GpuSettings(max_batch=8))
    torch.cuda.synchronize()
    assert torch.equal(engine.kv[held.pages], before)
    held.release()

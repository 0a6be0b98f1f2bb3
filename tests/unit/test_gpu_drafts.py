"""The draft model's part of a GPU, and its steps there: interpreted here, compiled on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draft_models import Drafting
from foreign_models import FOREIGN_MODELS
from gpu_ranks import engine_of, gpu_runner
from safetensors.torch import load_file
from speculating import SAMPLINGS, Loop, works
from tiny_models import TINY_MODELS, save

from baton.core.config import Config, with_device_defaults
from baton.core.config_values import Size
from baton.core.errors import InvalidConfig
from baton.engine.draft_model import MOST_BEHIND, draft_settings, page_bytes
from baton.engine.engine import Engine
from baton.engine.gpu.device import DraftRoom, GpuSettings
from baton.engine.gpu.draft_room import draft_room
from baton.engine.model_choice import read_model

PAGES, PAGE_SIZE = 200, 4


def engine(folder: Path, device: torch.device, short_chunk: int = 1) -> Engine:
    runner = gpu_runner(folder, str(device), PAGES, PAGE_SIZE, short_chunk=short_chunk)
    return engine_of(runner, folder, PAGES, PAGE_SIZE)


@pytest.mark.usefixtures("few_programs")
def test_answers_are_those_without_while_steps_run_ahead(
    device: torch.device, tmp_path: Path
) -> None:
    save(TINY_MODELS["llama"], tmp_path / "model")
    main = engine(tmp_path / "model", device)
    asked = works(SAMPLINGS[:2], answer=7)
    plain = Loop(main).answer(asked)
    same = Drafting(main, engine(tmp_path / "model", device, MOST_BEHIND))
    assert [each.tokens for each in same.answer(asked)] == [each.tokens for each in plain]
    assert same.drafts.right == same.drafts.compared > 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "qwen3-moe", "deepseek-v3"])
def test_room_is_left_for_weights_steps_and_pages(name: str, tmp_path: Path) -> None:
    save(TINY_MODELS[name], tmp_path)
    config, main = with_device_defaults(Config(max_context=64), "cuda"), GpuSettings()
    room = draft_room(config, tmp_path, torch.float32, main)
    stored = load_file(tmp_path / "model.safetensors").values()
    weights = sum(tensor.numel() * 4 for tensor in stored)
    larger = GpuSettings(chunk_tokens=64)  # steps are the draft's own
    assert draft_settings(config, larger) == draft_settings(config, main)
    assert room.fixed > weights
    assert room.page == page_bytes(read_model(tmp_path, "native", 64), config, 4, "cuda")
    fixed = with_device_defaults(Config(max_context=64, draft_kv_memory=Size(1 << 20)), "cuda")
    assert draft_room(fixed, tmp_path, torch.float32, main) == DraftRoom(room.fixed + (1 << 20), 0)


def test_pages_of_both_models_share_what_is_left() -> None:
    assert DraftRoom(100, 20).beside(700, 80) == 480
    assert DraftRoom(100, 0).beside(700, 80) == 600
    assert DraftRoom(100, 20).beside(50, 80) < 0


def test_a_draft_that_transformers_runs_is_refused_by_name(tmp_path: Path) -> None:
    save(FOREIGN_MODELS["stablelm"], tmp_path)
    with pytest.raises(InvalidConfig, match="natively") as refused:
        draft_room(with_device_defaults(Config(), "cuda"), tmp_path, torch.float32, GpuSettings())
    assert refused.value.field == "draft_model"

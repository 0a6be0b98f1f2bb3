"""Loading: checkpoints whole, sharded and broken; what an engine says of itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from engine_loop import KV_MEMORY, answer, load, sequence
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, change_config, generate_with_transformers, save
from transformers import AutoModelForCausalLM

from baton.core.errors import Internal, InvalidCheckpoint, InvalidConfig, ModelNotFound
from baton.engine.engine import Engine

PROMPT = list(range(1, 30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(TINY_MODELS["qwen2"], tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of the checkpoint; None removes one."""
    file = folder / "model.safetensors"
    changed = load_file(file) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)


def test_a_sharded_checkpoint_answers_as_transformers_does(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama"], tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert answer(load(tmp_path), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint_runs_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path).to(dtype).save_pretrained(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert answer(load(tmp_path), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


def test_settings_of_older_configs_mean_the_same(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama-llama3-rope"], tmp_path)
    scaling = dict(oracle.config.rope_parameters)
    theta = scaling.pop("rope_theta")
    change_config(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert answer(load(tmp_path), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


def test_a_tied_head_that_is_also_stored_is_skipped(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama-tied-mqa"], tmp_path)
    rewrite(tmp_path, **{"lm_head.weight": torch.zeros(1)})
    assert answer(load(tmp_path), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{NORM: None})
    with pytest.raises(InvalidCheckpoint, match=f"{NORM} is missing"):
        load(folder)


def test_a_misshaped_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{NORM: torch.ones(47)})
    with pytest.raises(InvalidCheckpoint, match=rf"{NORM} has shape \[47\].*\[48\]"):
        load(folder)


def test_a_tensor_of_integers_is_named(folder: Path) -> None:
    rewrite(folder, **{NORM: torch.ones(48, dtype=torch.int8)})
    with pytest.raises(InvalidCheckpoint, match=f"{NORM} is torch.int8"):
        load(folder)


def test_a_tensor_that_the_config_has_no_place_for_is_named(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.extra.weight": torch.ones(3)})
    with pytest.raises(InvalidCheckpoint, match=r"model.layers.0.extra.weight"):
        load(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidCheckpoint, match=r"model.safetensors"):
        load(folder)


def test_a_folder_without_weights_is_not_a_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model.safetensors"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path, shard_size="60KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelNotFound, match=shard.name):
        load(tmp_path)


def test_copies_of_a_model_have_one_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert load(folder).fingerprint == load(tmp_path / "copy").fingerprint


def test_another_model_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    save(TINY_MODELS["qwen2"], tmp_path / "tuned", seed=1)
    shutil.copytree(folder, tmp_path / "other")
    change_config(tmp_path / "other", rms_norm_eps=0.1)
    folders = (folder, tmp_path / "tuned", tmp_path / "other")
    assert len({load(each).fingerprint for each in folders}) == 3


def test_the_pool_fills_the_memory_it_is_given(folder: Path) -> None:
    engine = load(folder, page_size=8)
    assert engine.kv.is_contiguous()
    assert engine.kv.shape == (engine.pool.total, 3, 2, 8, 2, 8)
    page_bytes = engine.kv[0].nbytes
    assert KV_MEMORY - page_bytes < engine.kv.nbytes <= KV_MEMORY


def test_the_context_is_what_model_and_pool_and_operator_allow(folder: Path) -> None:
    page_bytes = load(folder).kv[0].nbytes
    assert load(folder).context_length == 256
    assert Engine.load(folder, kv_memory=page_bytes * 3).context_length == 48
    assert Engine.load(folder, kv_memory=KV_MEMORY, max_context=100).context_length == 100


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_memory": 10}, "kv_memory"),
        ({"page_size": 0}, "page_size"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_impossible_options_are_refused_by_name(
    folder: Path, options: dict[str, int], field: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        Engine.load(folder, **({"kv_memory": KV_MEMORY} | options))  # type: ignore[arg-type]
    assert refused.value.field == field


def test_progress_ends_at_one(folder: Path) -> None:
    seen: list[float] = []
    Engine.load(folder, kv_memory=KV_MEMORY, progress=lambda what, done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_piece_past_the_pages_is_refused(folder: Path) -> None:
    engine = load(folder)
    short = sequence(engine, PROMPT, 1)
    short.lease.pages.pop()
    with pytest.raises(Internal, match="pages"):
        engine.step({short: len(PROMPT)})


def test_a_piece_of_more_tokens_than_there_are_is_refused(folder: Path) -> None:
    engine = load(folder)
    with pytest.raises(Internal, match="30 of 29"):
        engine.step({sequence(engine, PROMPT, 1): 30})

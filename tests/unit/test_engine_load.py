"""Loading: checkpoints whole, sharded and broken; what an engine says of itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_loop import KV_MEMORY, answer, load, sequence
from rank_threads import split_engine
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, change_config, generate_with_transformers, save
from transformers import AutoModelForCausalLM

from baton.cluster.preflight import prepare
from baton.core.config import parse
from baton.core.errors import (
    Internal,
    InvalidCheckpoint,
    InvalidConfig,
    ModelNotFound,
    UnsupportedModel,
)
from baton.engine.draft_model import load_draft
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
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


def test_a_sharded_checkpoint_answers_as_transformers_does(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama"], tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert answer(load(tmp_path), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_checkpoint_of_another_precision_runs_in_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save(TINY_MODELS["llama"], tmp_path).to(dtype).save_pretrained(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert answer(load(tmp_path), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


def test_settings_of_older_configs_mean_the_same(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama-llama3-rope"], tmp_path)
    scaling = dict(oracle.config.rope_parameters)
    theta = scaling.pop("rope_theta")
    change_config(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert answer(load(tmp_path), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_equals_transformers(folder: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert answer(load(folder), PROMPT, 12) == generate_with_transformers(oracle, PROMPT, 12)


@pytest.mark.parametrize("stored", ["equal", "other", "alone"])
def test_a_stored_head_of_a_tied_model_means_what_transformers_makes_of_it(
    stored: str, tmp_path: Path
) -> None:
    """On one rank, and on two."""
    folder = tmp_path / "model"
    oracle = save(TINY_MODELS["qwen3-windows"], folder)
    embedding = oracle.get_input_embeddings().weight.detach()
    head = embedding.flip(0).contiguous() if stored == "other" else embedding.clone()
    rewrite(folder, **{HEAD: head, EMBEDDING: None if stored == "alone" else embedding.clone()})
    check_equals_transformers(folder)
    with split_engine(folder, 2, tmp_path) as split:
        assert answer(split.engine, PROMPT, 12) == answer(load(folder), PROMPT, 12)


def test_a_misshaped_head_of_a_tied_model_is_named(tmp_path: Path) -> None:
    save(TINY_MODELS["llama-tied-mqa"], tmp_path)
    rewrite(tmp_path, **{HEAD: torch.zeros(1)})
    with pytest.raises(InvalidCheckpoint, match=r"lm_head.weight has shape \[1\]"):
        load(tmp_path)


def test_a_single_file_beside_an_index_is_the_model(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path, shard_size="60KB")
    save(TINY_MODELS["llama"], tmp_path / "other", seed=3)
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    check_equals_transformers(tmp_path)


@pytest.fixture
def moved_shard(tmp_path: Path) -> Path:
    """A sharded model in `tmp_path/model`, whose first shard is outside that folder."""
    save(TINY_MODELS["llama"], tmp_path / "model", shard_size="60KB")
    shard = min((tmp_path / "model").glob("model-*.safetensors"))
    return shard.rename(tmp_path / shard.name)


def name_in_index(folder: Path, file: str, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{file}"', f'"{name}"'))


@pytest.mark.parametrize("place", ["..", "../model/..", "/absolute"])
def test_an_index_that_leaves_its_folder_is_refused(
    place: str, moved_shard: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path) if place == "/absolute" else place
    name_in_index(tmp_path / "model", moved_shard.name, f"{folder}/{moved_shard.name}")
    with pytest.raises(InvalidCheckpoint, match=rf"{moved_shard.name}', a file outside"):
        load(tmp_path / "model")


def test_a_link_may_leave_the_folder(moved_shard: Path, tmp_path: Path) -> None:
    """The hub's cache keeps its files as links."""
    (tmp_path / "model" / moved_shard.name).symlink_to(moved_shard)
    check_equals_transformers(tmp_path / "model")


@pytest.mark.parametrize("weight_map", [{"tensor": 5}, ["file"], None])
def test_an_index_without_file_names_is_refused(weight_map: object, tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path, shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidCheckpoint, match="not an index"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(InvalidCheckpoint, match="names no files"):
        load(tmp_path)


def test_a_folder_with_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter"):
        load(folder)


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


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["deepseek-v3"].changed(num_nextn_predict_layers=1), tmp_path)
    wanted = generate_with_transformers(oracle, PROMPT, 4)
    rewrite(tmp_path, **{"model.layers.3.enorm.weight": torch.ones(48)})
    assert answer(load(tmp_path), PROMPT, 4) == wanted
    rewrite(tmp_path, **{"model.layers.4.enorm.weight": torch.ones(48)})
    with pytest.raises(InvalidCheckpoint, match=r"model.layers.4.enorm.weight"):
        load(tmp_path)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidCheckpoint, match=r"model.safetensors"):
        load(folder)


@pytest.fixture
def pointer(folder: Path) -> str:
    """The message about a pointer of Git LFS instead of the weights."""
    file = folder / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return f"{file} is a pointer of Git LFS; run `git lfs pull`"


def test_a_pointer_of_git_lfs_is_called_so_before_the_start(folder: Path, pointer: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=pointer):
        prepare(parse({"model": str(folder)}))


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_pointer_of_git_lfs_is_not_loaded(engine: str, folder: Path, pointer: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=pointer):
        load(folder, engine=engine)


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


def test_a_context_longer_than_the_models_is_refused_before_the_start(folder: Path) -> None:
    config = parse({"model": str(folder), "max_context": 257})
    message = r"max_context is 257, and the model \(qwen2\) has a context of 256"
    for start in (
        lambda: prepare(config),
        lambda: Engine.load(folder, kv_memory=KV_MEMORY, max_context=257),
    ):
        with pytest.raises(InvalidConfig, match=message) as refused:
            start()
        assert refused.value.field == "max_context"
    assert Engine.load(folder, kv_memory=KV_MEMORY, max_context=256).context_length == 256


def test_a_draft_may_have_a_shorter_context_than_is_asked_for(folder: Path, tmp_path: Path) -> None:
    save(TINY_MODELS["qwen2"].changed(max_position_embeddings=128), tmp_path / "draft")
    draft = str(tmp_path / "draft")
    config = parse({"speculation": "draft", "draft_model": draft, "max_context": 200})
    assert (
        load_draft(
            config, Path(draft), Engine.load(folder, kv_memory=KV_MEMORY, max_context=200)
        ).context_length
        == 128
    )


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

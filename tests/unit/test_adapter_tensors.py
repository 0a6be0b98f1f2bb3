"""Which tensors of a LoRA adapter's file are read, and as what: PEFT is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import load_now, open_pool, save_adapter
from engine_loop import load, serve
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, choices_of_transformers, save
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from baton.core.adapter_store import find_adapter
from baton.core.errors import AdapterMissing, InvalidAdapter
from baton.engine.engine import Engine

PROMPTS = [[(7 * place * place + 3) % 190 for place in range(20)]]
COUNT = 12

VISION = {
    "hidden_size": 48,  # as wide as the text model
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
TOWER = "base_model.model.model.vision_tower.encoder.layers"
LAYERS = "base_model.model.model.layers"


def add_vision(text: PreTrainedModel) -> PreTrainedModel:
    """A multimodal model with this text model and a vision tower."""
    config = Gemma3Config(
        text_config=text.config.to_dict(), vision_config=VISION, tie_word_embeddings=False
    )
    model: PreTrainedModel = Gemma3ForConditionalGeneration(config).float().eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def rename(folder: Path, old: str, new: str) -> None:
    """Replaces a part of all tensors' names."""
    file = folder / "adapter_model.safetensors"
    save_file({key.replace(old, new): each for key, each in load_file(file).items()}, file)


def add_tensors(folder: Path, old: str, new: str) -> None:
    """Adds other tensors under the names that `rename` would give."""
    file = folder / "adapter_model.safetensors"
    held = load_file(file)
    added = {key.replace(old, new): each + 1.0 for key, each in held.items() if old in key}
    save_file(held | added, file)


def answers_with(engine: Engine, folder: Path) -> list[list[int]]:
    adapter = find_adapter(str(folder))
    load_now(open_pool(engine), adapter)
    return serve(engine, PROMPTS, COUNT, chunk=7, adapters=[adapter])


SETTINGS: list[dict[str, object]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {
        "target_modules": r"model\.language_model\.layers\.\d\.(self_attn|mlp)\.(q|up)_proj",
        "rank_pattern": {"^model.language_model.layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {"language_model.layers.0.mlp.up_proj": 3},
    },
    {"target_modules": ["q_proj"], "exclude_modules": r".*language_model\.layers\.1\..*"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_adapter_of_a_multimodal_model_answers_as_peft(
    settings: dict[str, object], tmp_path: Path
) -> None:
    base = save(TINY_MODELS["gemma3"], tmp_path / "base")
    oracle = save_adapter(add_vision(base), tmp_path / "adapter", **settings)
    answers = answers_with(load(tmp_path / "base"), tmp_path / "adapter")
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)
    assert answers != choices_of_transformers(base, PROMPTS, answers)


@pytest.fixture
def base(tmp_path: Path) -> PreTrainedModel:
    return save(TINY_MODELS["llama"], tmp_path / "base")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapter"


@pytest.fixture
def engine(base: PreTrainedModel, tmp_path: Path) -> Engine:
    return load(tmp_path / "base")


@pytest.mark.parametrize(
    "layers",
    [
        "base_model.model.layers",
        "base_model.model.language_model.layers",
        "base_model.model.language_model.model.layers",
        "base_model.model.model.text_model.layers",
        "model.layers",
    ],
)
def test_the_text_models_layers_have_several_names(
    layers: str, base: PreTrainedModel, engine: Engine, folder: Path
) -> None:
    oracle = save_adapter(base, folder, target_modules=["q_proj"])
    rename(folder, LAYERS, layers)
    add_tensors(folder, layers, TOWER)
    answers = answers_with(engine, folder)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_an_adapter_of_other_towers_alone_is_refused(
    base: PreTrainedModel, engine: Engine, folder: Path
) -> None:
    save_adapter(base, folder, target_modules=["q_proj"])
    rename(folder, LAYERS, TOWER)
    with pytest.raises(InvalidAdapter, match=rf"no tensors of the text model, only {TOWER}\.0"):
        answers_with(engine, folder)


def change_type(folder: Path, dtype: torch.dtype, factor: float = 1.0) -> None:
    file = folder / "adapter_model.safetensors"
    held = {name: each.to(dtype) * factor for name, each in load_file(file).items()}
    save_file(held, file)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_adapter_of_another_precision_answers_as_peft(
    dtype: torch.dtype, base: PreTrainedModel, engine: Engine, folder: Path
) -> None:
    save_adapter(base, folder)
    change_type(folder, dtype)
    oracle = PeftModel.from_pretrained(base, str(folder)).eval()
    answers = answers_with(engine, folder)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_numbers_too_large_for_float32_are_refused(
    base: PreTrainedModel, engine: Engine, folder: Path
) -> None:
    save_adapter(base, folder)
    change_type(folder, torch.float64, factor=1e100)
    with pytest.raises(InvalidAdapter, match="values that are not finite"):
        answers_with(engine, folder)


def test_a_pointer_of_git_lfs_is_called_so(
    base: PreTrainedModel, engine: Engine, folder: Path
) -> None:
    """When the adapter is added, and when a worker loads it from its own folder."""
    save_adapter(base, folder)
    adapter, file = find_adapter(str(folder)), folder / "adapter_model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    message = f"{file} is a pointer of Git LFS; run `git lfs pull`"
    with pytest.raises(AdapterMissing, match=message):
        find_adapter(str(folder))
    with pytest.raises(AdapterMissing, match=message):
        load_now(open_pool(engine), adapter)


@pytest.mark.parametrize(
    ("old", "new"), [("model.model.layers", "model.layers"), (".weight", ".default.weight")]
)
def test_two_tensors_for_one_module_are_refused(
    old: str, new: str, base: PreTrainedModel, engine: Engine, folder: Path
) -> None:
    save_adapter(base, folder, target_modules=["q_proj"])
    add_tensors(folder, old, new)
    with pytest.raises(InvalidAdapter, match=r"tensors \S+ and \S+ are for one module"):
        answers_with(engine, folder)

"""A config.json that describes another model than the tensors beside it is refused before anything
is started, and before anything of the stated size is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import TINY_MODELS, change_config, save

from baton.cluster.preflight import prepare
from baton.core.config import parse
from baton.core.errors import InvalidCheckpoint, InvalidConfig
from baton.engine.architecture import read_architecture
from baton.engine.engine import Engine
from baton.engine.stored_shapes import check_stored

LARGE = 10**9


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("llama", "vocab_size", LARGE),
        ("llama", "hidden_size", LARGE),
        ("llama", "hidden_size", 0),
        ("llama", "intermediate_size", LARGE),
        ("llama", "num_attention_heads", LARGE),
        ("llama", "head_dim", LARGE),
        ("llama", "num_hidden_layers", 4),
        ("qwen2", "num_key_value_heads", 6),
        ("mixtral", "num_local_experts", LARGE),
        ("mixtral", "intermediate_size", LARGE),
        ("qwen2-moe", "intermediate_size", LARGE),
        ("deepseek-v2", "n_routed_experts", LARGE * 3),
        ("deepseek-v2", "n_shared_experts", LARGE),
        ("deepseek-v2", "kv_lora_rank", LARGE),
        ("deepseek-v2", "q_lora_rank", LARGE),
        ("deepseek-v2", "v_head_dim", LARGE),
        ("deepseek-v2", "qk_nope_head_dim", LARGE),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(
    model: str, key: str, value: int, tmp_path: Path
) -> None:
    save(TINY_MODELS[model], tmp_path)
    prepare(parse({"model": str(tmp_path)}))
    change_config(tmp_path, **{key: value})
    with pytest.raises(InvalidCheckpoint, match=r"config\.json asks for"):
        prepare(parse({"model": str(tmp_path)}))
    with pytest.raises(InvalidCheckpoint, match=r"config\.json asks for"):
        Engine.load(tmp_path, kv_memory=1 << 44)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": LARGE}, "'num_hidden_layers' must be at most 10000"),
        ({"model_type": "gpt2", "n_layer": LARGE}, "'n_layer' must be at most 10000"),
        ({"max_position_embeddings": 0}, "a model needs a context"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be above 0, not 0"),
    ],
)
def test_numbers_that_no_model_has_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(InvalidConfig, match=message):
        prepare(parse({"model": str(tmp_path)}))


@pytest.mark.parametrize("model", TINY_MODELS)
def test_the_tensors_of_every_family_are_as_expected(model: str, tmp_path: Path) -> None:
    save(TINY_MODELS[model], tmp_path)
    check_stored(tmp_path, read_architecture(tmp_path))

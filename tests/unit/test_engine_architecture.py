"""config.json: what is read from it, against transformers' own reading, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from baton.core.errors import BatonError, InvalidConfig, ModelNotFound, UnsupportedModel
from baton.engine.architecture import Architecture, read_architecture
from baton.engine.families import FAMILIES
from baton.engine.rotations import inverse_frequencies

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def read(folder: Path, **changes: object) -> Architecture:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_architecture(folder)


def of_family(name: str) -> dict[str, object]:
    return {"model_type": name, "architectures": [FAMILIES[name].class_name]}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}

STRETCHES = {"short_factor": [1.0 + n / 4 for n in range(8)], "long_factor": [8.0] * 8}

ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_theta": 5_000.0},
    "none": {},
    "empty scaling": {"rope_scaling": {}, "rope_parameters": {"rope_theta": 5_000.0}},
    "both": {
        "rope_scaling": {"type": "linear", "factor": 3.0},
        "rope_parameters": {"rope_theta": 5_000.0},
    },
    "theta beside": {"rope_theta": 7e3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3-new": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn-new": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    "yarn-no-original": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn-betas": {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 20, "beta_slow": 3}},
    "yarn-exact": {"rope_scaling": {"type": "yarn", **YARN, "truncate": False}},
    "yarn-mscale": {"rope_scaling": {"type": "yarn", **YARN, "mscale": 2.0, "mscale_all_dim": 0.7}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "longrope": {
        **of_family("phi3"),
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"type": "longrope", **STRETCHES},
    },
    "longrope-new": {
        **of_family("phi3"),
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e5, **STRETCHES}
        | {"partial_rotary_factor": 0.25, "attention_factor": 1.3},
    },
    "gpt-oss": of_family("gpt_oss"),
    "gpt-oss-20b": {
        **of_family("gpt_oss"),
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "yarn-attention": {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.3}},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotations_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture = read(tmp_path, **ROPES[name])
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    (rope,) = architecture.ropes
    torch.testing.assert_close(inverse_frequencies(rope), rotary.inv_freq, rtol=1e-5, atol=1e-12)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_config_leaves_out_is_assumed_as_transformers_does(
    name: str, tmp_path: Path
) -> None:
    silent = of_family(name) | {
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "max_position_embeddings": None,
        "rms_norm_eps": None,
    }
    if name == "dots1":  # It assumes no number.
        silent |= {"n_routed_experts": 16, "num_experts_per_tok": 4}
    if name == "deepseek_v2":
        silent |= {"num_experts_per_tok": 4}
    values = {key: value for key, value in (LLAMA | silent).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, config = read_architecture(tmp_path), AutoConfig.from_pretrained(tmp_path)
    if ours.routing:
        named = "num_experts" if name in ("qwen2_moe", "deepseek_v2") else "num_local_experts"
        experts = getattr(config, named)
        assert ours.routing.experts == experts
        assert ours.routing.top_k == config.num_experts_per_tok
        columns = getattr(config, "moe_intermediate_size", config.intermediate_size)
        assert ours.routing.columns == columns
        shared = columns * (getattr(config, "n_shared_experts", 0) or 0)
        shared = getattr(config, "shared_expert_intermediate_size", shared)
        assert ours.routing.shared * columns == shared
        assert ours.routing.normalized == getattr(config, "norm_topk_prob", True)
    if latent := ours.latent:
        assert (latent.rank, latent.query_rank) == (config.kv_lora_rank, config.q_lora_rank)
        assert (latent.plain, latent.rotated) == (config.qk_nope_head_dim, config.qk_rope_head_dim)
        assert latent.value == config.v_head_dim
        assert (ours.kv_heads, ours.head_dim) == (1, latent.rank + latent.rotated)
    else:
        assert ours.kv_heads == config.num_key_value_heads
        assert ours.head_dim == (getattr(config, "head_dim", None) or 256 // 32)
    assert ours.context_length == config.max_position_embeddings
    assert ours.norm_epsilon == config.rms_norm_eps
    thetas = [found["rope_theta"] for found in _by_layer_type(config.rope_parameters)]
    assert [rope.theta for rope in ours.ropes] == thetas
    assert ours.tied_embeddings == config.tie_word_embeddings
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 4
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in types)
    rotates = [place is not None for place in ours.rope_of_layer]
    assert rotates == list(map(bool, getattr(config, "no_rope_layers", [1] * 4)))


def _by_layer_type(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    types = ("full_attention", "sliding_attention")
    return [parameters[kind] for kind in types] if types[0] in parameters else [parameters]


def test_yarn_extends_a_context_that_is_stated_before_scaling(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, rope_scaling=scaling).context_length == 16_384


def test_longrope_is_long_where_more_than_the_original_context_is_served(tmp_path: Path) -> None:
    original = {"original_max_position_embeddings": 1024, "partial_rotary_factor": 0.25}
    config = LLAMA | of_family("phi3") | original | {"rope_scaling": {"type": "su", **STRETCHES}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {most: read_architecture(tmp_path, most).ropes[0] for most in (None, 1025, 1024)}
    assert found[None] == found[1025]
    assert [list(rope.stretches) for rope in found.values()] == [
        STRETCHES["long_factor"],
        STRETCHES["long_factor"],
        STRETCHES["short_factor"],
    ]
    assert found[1024].attention_factor == pytest.approx((1 + 2 / 10) ** 0.5)


def test_dynamic_ntk_extends_a_context_for_who_asks(tmp_path: Path) -> None:
    read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    contexts = (None, 100, 6000, 100_000)
    found = [read_architecture(tmp_path, most) for most in contexts]
    assert [each.context_length for each in found] == [4096, 4096, 6000, 8192]
    assert [each.ropes[0].theta > 10_000.0 for each in found] == [False, False, True, True]


def test_a_window_over_the_whole_context_is_none(tmp_path: Path) -> None:
    windows = {
        size: read(tmp_path, **of_family("mistral"), sliding_window=size).windows[0]
        for size in (4095, 4096, 262_144)
    }
    assert windows == {4095: 4095, 4096: None, 262_144: None}


def test_keys_that_a_family_does_not_know_have_no_effect(tmp_path: Path) -> None:
    strange = {"residual_multiplier": 0.5, "attn_logit_softcapping": 3.0, "logits_scaling": 2.0}
    assert read(tmp_path, **strange) == read(tmp_path)
    for family, key in (
        ("qwen2_moe", "num_local_experts"),
        ("deepseek_v2", "num_local_experts"),
        ("deepseek_v3", "num_experts"),
        ("dots1", "num_experts"),
    ):
        mixture = of_family(family) | {"num_experts_per_tok": 2, "n_routed_experts": 16}
        assert read(tmp_path, **mixture, **{key: 4}) == read(tmp_path, **mixture)


def test_the_scale_of_scores_over_latents_is_that_of_transformers(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.7, **YARN}
    for name in ("deepseek_v2", "deepseek_v3"):
        for changes in ({}, {"rope_scaling": scaling}):
            few = {"num_experts_per_tok": 2, "n_routed_experts": 16, "num_key_value_heads": 4}
            ours = read(tmp_path, **of_family(name), **few, **changes)
            with torch.device("meta"):
                theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
            assert ours.score_scale == pytest.approx(theirs.model.layers[0].self_attn.scaling)


def test_a_null_cap_is_none(tmp_path: Path) -> None:
    silent = read(tmp_path, **of_family("gemma2"))
    assert (silent.score_cap, silent.logit_cap) == (50.0, 30.0)
    capped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    found = read(tmp_path, **of_family("gemma2"), **capped)
    assert (found.score_cap, found.logit_cap) == (None, None)


REFUSED: dict[str, tuple[dict[str, object], type[BatonError], str]] = {
    "unknown family": ({"model_type": "mamba"}, UnsupportedModel, "llama.*qwen3"),
    "no family": ({"model_type": None}, UnsupportedModel, "supported"),
    "code of its own": (
        {"architectures": ["MyLlama"], "auto_map": {"AutoModelForCausalLM": "my.MyLlama"}},
        UnsupportedModel,
        "MyLlama",
    ),
    "not a generator": (
        {"architectures": ["LlamaForSequenceClassification"]},
        UnsupportedModel,
        "SequenceClassification",
    ),
    "quantized": ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModel, "'hqq'"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
    "unknown rope": ({"rope_scaling": {"type": "proportional"}}, UnsupportedModel, "dynamic.*yarn"),
    "longrope without factors": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        InvalidConfig,
        "short_factor",
    ),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        UnsupportedModel,
        "between layers",
    ),
    "attention to later tokens": ({"is_causal": False}, UnsupportedModel, "is_causal false"),
    "an encoder": ({"is_encoder_decoder": True}, UnsupportedModel, "is_encoder_decoder"),
    "chunked attention": ({"attention_chunk_size": 64}, UnsupportedModel, "attention_chunk_size"),
    "shared keys": ({"num_kv_shared_layers": 2}, UnsupportedModel, "num_kv_shared_layers"),
    "layers of their own": (
        {"per_layer_config": {"1": {"intermediate_size": 64}}},
        UnsupportedModel,
        "per_layer_config",
    ),
    "other weights": (
        {"transformers_weights": "other.safetensors"},
        UnsupportedModel,
        "transformers_weights",
    ),
    "a window in a family without": ({"sliding_window": 512}, UnsupportedModel, "sliding_window"),
    "layer types in a family without": (
        {"layer_types": ["sliding_attention"] * 4},
        UnsupportedModel,
        "layer_types",
    ),
    "a window of nothing": (
        of_family("mistral") | {"sliding_window": 0},
        InvalidConfig,
        "sliding window of 0",
    ),
    "a residual of nothing": (
        of_family("granite") | {"residual_multiplier": 0.0},
        InvalidConfig,
        "residual_multiplier",
    ),
    "a cap of nothing": (
        of_family("gemma2") | {"attn_logit_softcapping": 0.0},
        InvalidConfig,
        "attn_logit_softcapping must be above 0",
    ),
    "too few factors": (
        of_family("phi3") | {"rope_scaling": {"type": "longrope", **STRETCHES}},
        InvalidConfig,
        "short_factor must have 32 numbers",
    ),
    "attention to both sides": (
        of_family("gemma3_text") | {"use_bidirectional_attention": True},
        UnsupportedModel,
        "use_bidirectional_attention",
    ),
    "another clamp": (
        of_family("gpt_oss") | {"swiglu_limit": 10.0},
        UnsupportedModel,
        "swiglu_limit 10.0",
    ),
    "quantized otherwise": (
        of_family("gpt_oss") | {"quantization_config": {"quant_method": "awq"}},
        UnsupportedModel,
        "awq",
    ),
    "MXFP4 in another family": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        UnsupportedModel,
        "mxfp4",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial"),
    "llama3 without factor": (
        {"rope_scaling": {"rope_type": "llama3"}},
        InvalidConfig,
        "factor",
    ),
    "heads that do not divide": ({"num_key_value_heads": 3}, InvalidConfig, "3 key heads"),
    "an odd head": ({"head_dim": 7}, InvalidConfig, "7"),
    "no layers": ({"num_hidden_layers": 0}, InvalidConfig, "layers"),
    "a string for a number": ({"hidden_size": "256"}, InvalidConfig, "hidden_size"),
    "no vocabulary": ({"vocab_size": None}, InvalidConfig, "vocab_size"),
    "unknown layer type": (
        of_family("qwen2") | {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
        UnsupportedModel,
        "linear_attention",
    ),
    "sliding layers without a window": (
        of_family("qwen2") | {"layer_types": ["sliding_attention"] * 4},
        InvalidConfig,
        "window",
    ),
    "biases of latents": (
        of_family("deepseek_v3") | {"attention_bias": True},
        UnsupportedModel,
        "attention_bias",
    ),
    "a rotation without a context": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
        InvalidConfig,
        "numbers that no model can have: division by zero",
    ),
    "an infinite rotation": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": float("inf"),
                "original_max_position_embeddings": 64,
            }
        },
        InvalidConfig,
        "numbers that no model can have",
    ),
    "a rotation by no turns": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1.0}},
        InvalidConfig,
        "beta_fast and beta_slow above 0",
    ),
    "layer types in lists": (
        of_family("qwen2") | {"layer_types": [["full_attention"]] * 4},
        UnsupportedModel,
        "layer types",
    ),
    "a residual of infinity": (
        of_family("granite") | {"residual_multiplier": 1e308},
        InvalidConfig,
        "numbers that no model can have",
    ),
    "latents of nothing": (
        of_family("deepseek_v3") | {"kv_lora_rank": 0},
        InvalidConfig,
        "latent attention needs",
    ),
    "an unknown choice of experts": (
        of_family("deepseek_v2") | {"topk_method": "random", "num_experts_per_tok": 2},
        UnsupportedModel,
        "topk_method 'random'",
    ),
    "mistral with layer types": (
        of_family("mistral") | {"layer_types": ["full_attention"] * 4},
        UnsupportedModel,
        "layer_types",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        read(tmp_path, **changes)


HARMLESS: dict[str, object] = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "sliding_window": 4096,
    "layer_types": ["full_attention"] * 4,
    "per_layer_config": None,
    "pretraining_tp": 2,
    "final_logit_softcapping": 30.0,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_key_that_changes_nothing_in_transformers_changes_nothing(
    name: str, tmp_path: Path
) -> None:
    assert read(tmp_path, **{name: HARMLESS[name]}) == read(tmp_path)


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_architecture(tmp_path)


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidConfig, match="not valid JSON"):
        read_architecture(tmp_path)

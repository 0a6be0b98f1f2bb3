"""The engine's greedy tokens against transformers', for every kind of model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_loop import answer, load, sequence, serve
from tiny_models import (
    TINY_MODELS,
    VOCABULARY,
    build,
    choices_of_transformers,
    generate_with_transformers,
    save,
)

from baton.engine.engine import Engine

ANSWER = 12
"""Passes the end of a page of 32 tokens after a prompt of 23."""


def random_prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(1000 * seed + length)
    return [source.randrange(VOCABULARY) for _ in range(length)]


PROMPTS = [random_prompt(length) for length in (1, 5, 23, 40, 90)]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_mixed_batch_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    oracle = save(TINY_MODELS[name], tmp_path)
    expected: list[list[int]] = []
    for page_size, chunk in ((1, 7), (4, 64), (32, 200)):
        engine = load(tmp_path, page_size)
        answers = serve(engine, PROMPTS, ANSWER, chunk)
        expected = expected or choices_of_transformers(oracle, PROMPTS, answers)
        assert answers == expected, (page_size, chunk)
        assert engine.pool.free == engine.pool.total
    assert len({token for tokens in expected for token in tokens}) > 20


@pytest.mark.parametrize("heads", [1, 3])
def test_projections_smaller_than_a_panel_answer_as_transformers_does(
    heads: int, tmp_path: Path
) -> None:
    shape = {"head_dim": 8, "num_attention_heads": heads, "num_key_value_heads": 1}
    oracle = save(TINY_MODELS["llama"].changed(**shape), tmp_path)
    answers = serve(load(tmp_path), PROMPTS, ANSWER, 9)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_a_chunk_of_many_blocks_after_a_prefix_answers_as_transformers_does(
    tmp_path: Path,
) -> None:
    model = TINY_MODELS["llama"].changed(max_position_embeddings=1024)
    oracle = save(model, tmp_path)
    prompt = random_prompt(700)
    expected = generate_with_transformers(oracle, prompt, ANSWER)
    for chunk in (700, 300, 128):
        assert serve(load(tmp_path), [prompt], ANSWER, chunk) == [expected], chunk


FEATURES: dict[str, tuple[str, dict[str, object]]] = {
    "the sliding window": ("mistral-window", {"sliding_window": None}),
    "late windows": ("qwen2-late-windows", {"use_sliding_window": False}),
    "layer types": ("qwen2-layer-types", {"layer_types": ["full_attention"] * 3}),
    "windows of layers without rotation": ("smollm3-windows", {"use_sliding_window": False}),
    "llama3 scaling": ("llama-llama3-rope", {"rope_parameters": {"rope_theta": 500.0}}),
    "linear scaling": ("llama-linear-rope", {"rope_parameters": {"rope_theta": 10_000.0}}),
    "YaRN scaling": ("llama-yarn-rope", {"rope_parameters": {"rope_theta": 10_000.0}}),
    "layers without rotation": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    "the base of rotation": ("llama", {"rope_parameters": {"rope_theta": 100.0}}),
    "the epsilon of norms": ("llama", {"rms_norm_eps": 0.5}),
    "the embedding's multiplier": ("granite", {"embedding_multiplier": 1.0}),
    "the residual's multiplier": ("granite", {"residual_multiplier": 1.0}),
    "the scores' multiplier": ("granite", {"attention_multiplier": 0.1}),
    "partial rotation": ("phi3-partial", {"rope_parameters": {"rope_theta": 1e4}}),
    "a window in all layers": ("phi3", {"sliding_window": None}),
    "the cap of scores": ("gemma2", {"attn_logit_softcapping": None}),
    "the scale of scores": ("gemma2", {"query_pre_attn_scalar": 16}),
    "windows by pattern": ("gemma2", {"layer_types": ["full_attention"] * 3}),
    "gelu": ("gemma2", {"hidden_activation": "silu"}),
    "the rope of local layers": ("gemma3", {"rope_parameters": None}),
    "windows by type": ("ministral", {"layer_types": ["full_attention"] * 3}),
    "weights that sum to one": ("qwen3-moe", {"norm_topk_prob": False}),
    "the number of experts per token": ("mixtral", {"num_experts_per_tok": 1}),
    "gelu in experts": ("mixtral-window", {"hidden_act": "silu"}),
    "layers without experts": ("qwen2-moe", {"mlp_only_layers": []}),
    "steps between layers with experts": ("qwen3-moe-steps", {"decoder_sparse_step": 1}),
    "first layers without experts": ("dots1", {"first_k_dense_replace": 0}),
    "groups of experts": ("dots1", {"n_group": 1, "topk_group": 1}),
    "the scale of experts": ("dots1", {"routed_scaling_factor": 1.0}),
    "alternate windows": ("qwen2-moe-windows", {"use_sliding_window": False}),
    "windows of alternate layers": ("gpt-oss", {"layer_types": ["full_attention"] * 3}),
    "YaRN's fractions of pairs": (
        "gpt-oss",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0}},
    ),
    "YaRN's correction of scores": (
        "deepseek-v2-lite",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
            | {"original_max_position_embeddings": 64}
        },
    ),
    "groups of experts with the best one": ("deepseek-v2", {"topk_method": "greedy"}),
    "pairs of a latent side by side": ("deepseek-v3", {"rope_interleave": False}),
    "a window of every layer": ("qwen3-moe-steps", {"use_sliding_window": False}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_switched_off_changes_the_answer(feature: str, tmp_path: Path) -> None:
    name, changes = FEATURES[feature]
    model, prompt = TINY_MODELS[name], random_prompt(60)
    save(model, tmp_path / "on")
    oracle = save(model.changed(**changes), tmp_path / "off")
    off = answer(load(tmp_path / "off"), prompt, ANSWER)
    assert [off] == choices_of_transformers(oracle, [prompt], [off])
    assert off != answer(load(tmp_path / "on"), prompt, ANSWER)


def scalings(dim: int) -> list[dict[str, object]]:
    """Of every kind, for heads of which `dim` numbers are rotated."""
    context = {"original_max_position_embeddings": 64}
    factors = {
        f"{name}_factor": [1.0 + pair * step for pair in range(dim // 2)]
        for name, step in (("short", 0.1), ("long", 1.0))
    }
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, **context},
        {"rope_type": "llama3", **llama3, **context},
        {"rope_type": "longrope", "factor": 4.0, **factors, **context},
    ]


SCALED = ["mistral-window", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "gemma2", "gemma3"]
SCALED += ["ministral", "mixtral", "qwen2-moe", "qwen3-moe", "dots1", "gpt-oss"]
SCALED += ["deepseek-v2", "deepseek-v3"]


@pytest.mark.parametrize("name", SCALED)
def test_every_family_scales_its_rotation_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Up to LongRoPE's original context. transformers refuses all but LongRoPE in Phi."""
    model, prompt = TINY_MODELS[name].changed(num_hidden_layers=1), random_prompt(50)
    model = model.changed(layer_types=None, no_rope_layers=None, mlp_only_layers=None)
    config = build(model).config
    dim = getattr(config, "qk_rope_head_dim", 0) or getattr(config, "head_dim", 0) or 12
    for number, scaling in enumerate(scalings(dim)):
        rope: dict[str, object] = {"rope_theta": 1e3, **scaling}
        if name == "gemma3":
            rope = {"full_attention": rope, "sliding_attention": rope | {"rope_type": "default"}}
        oracle = save(model.changed(rope_parameters=rope, head_dim=dim), tmp_path / str(number))
        engine = Engine.load(tmp_path / str(number), kv_memory=1 << 20, max_context=64)
        tokens = answer(engine, prompt, 8)
        expected = choices_of_transformers(oracle, [prompt], [tokens])
        assert [tokens] == expected, scaling["rope_type"]


@pytest.mark.parametrize("max_context", [32, 256])
def test_longrope_stretches_as_the_served_context_asks(max_context: int, tmp_path: Path) -> None:
    """transformers chooses by the length of a call."""
    model = TINY_MODELS["phi3-long"].changed(original_max_position_embeddings=32)
    oracle = save(model, tmp_path)
    for prompt in [prompt for prompt in PROMPTS if (len(prompt) > 32) == (max_context > 32)]:
        count = min(ANSWER, max_context - len(prompt))
        engine = Engine.load(tmp_path, kv_memory=4 << 20, max_context=max_context)
        expected = generate_with_transformers(oracle, prompt, count)
        assert serve(engine, [prompt], count, 7) == [expected]


def test_a_longer_context_by_dynamic_ntk_is_as_in_one_call_of_its_length(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama-dynamic-rope"], tmp_path)
    prompt = random_prompt(399)
    engine = Engine.load(tmp_path, kv_memory=4 << 20, max_context=400)
    assert engine.context_length == 400
    padded = torch.tensor([[*prompt, 0]])
    with torch.no_grad():
        logits = oracle(padded).logits[0, len(prompt) - 1]
    assert serve(engine, [prompt], 1, 64) == [[int(logits.argmax())]]


@pytest.mark.parametrize("changes", [{"attention_factor": 1.7}, {"mscale": 1.0}])
def test_what_yarn_does_to_attention_changes_the_answer(
    changes: dict[str, float], tmp_path: Path
) -> None:
    model, prompt = TINY_MODELS["qwen2-yarn-mscale"], random_prompt(60)
    scaling = model.settings["rope_parameters"]
    assert isinstance(scaling, dict)
    oracle = save(model.changed(rope_parameters=scaling | changes), tmp_path / "changed")
    save(model, tmp_path / "plain")
    tokens = answer(load(tmp_path / "changed"), prompt, ANSWER)
    assert [tokens] == choices_of_transformers(oracle, [prompt], [tokens])
    assert tokens != answer(load(tmp_path / "plain"), prompt, ANSWER)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("qwen2", "q_proj.bias"),
        ("qwen2", "k_proj.bias"),
        ("qwen2", "v_proj.bias"),
        ("llama-biases", "o_proj.bias"),
        ("llama-biases", "gate_proj.bias"),
        ("llama-biases", "up_proj.bias"),
        ("llama-biases", "down_proj.bias"),
        ("qwen3", "q_norm.weight"),
        ("qwen3", "k_norm.weight"),
        ("olmo2", "q_norm.weight"),
        ("olmo2", "k_norm.weight"),
        ("olmo2", "o_proj.bias"),
        ("olmo2", "post_feedforward_layernorm.weight"),
        ("gemma2", "post_attention_layernorm.weight"),
        ("gemma2", "pre_feedforward_layernorm.weight"),
        ("gemma2", "post_feedforward_layernorm.weight"),
        ("gemma3", "q_norm.weight"),
        ("gpt-oss", "sinks"),
        ("gpt-oss", "router.bias"),
        ("gpt-oss", "gate_up_proj_bias"),
        ("gpt-oss", "down_proj_bias"),
        ("deepseek-v3", "q_a_layernorm.weight"),
        ("deepseek-v3", "kv_a_layernorm.weight"),
    ],
)
def test_each_small_tensor_counts(name: str, parameter: str, tmp_path: Path) -> None:
    oracle = save(TINY_MODELS[name], tmp_path / "before")
    with torch.no_grad():
        for full_name, tensor in oracle.named_parameters():
            if full_name.endswith(parameter):
                tensor.copy_(tensor.flip(0) * 1.5)
    oracle.save_pretrained(tmp_path / "after")
    prompt = random_prompt(30)
    tokens = answer(load(tmp_path / "after"), prompt, ANSWER)
    assert [tokens] == choices_of_transformers(oracle, [prompt], [tokens])
    assert tokens != answer(load(tmp_path / "before"), prompt, ANSWER)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    [
        "llama-biases",
        "qwen3",
        "mistral-window",
        "granite",
        "olmo2",
        "phi3-long",
        "gemma3",
        "deepseek-v2-lite",
    ],
)
def test_half_precision_stays_close_to_float32(name: str, dtype: str, tmp_path: Path) -> None:
    """The answer of a narrower type, token by token, is among float32's likeliest."""
    oracle = save(TINY_MODELS[name], tmp_path)
    prompt = random_prompt(40)
    tokens = answer(load(tmp_path, dtype=dtype), prompt, ANSWER)
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    spread = logits.std(dim=1)
    assert ((logits.amax(dim=1) - chosen) / spread).max() < 0.15


def test_a_step_without_a_last_token_samples_nothing_and_advances(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = load(tmp_path)
    first, second = sequence(engine, PROMPTS[3], 1), sequence(engine, PROMPTS[2], 1)
    assert engine.step({first: 8, second: 23})[0] is None
    assert engine.step({first: 8}) == [None]
    assert (first.computed, second.computed) == (16, 23)
    assert first.tokens == PROMPTS[3]


@pytest.mark.parametrize("name", ["qwen3-windows", "gpt-oss"])
def test_pages_of_another_engine_continue_the_answer(name: str, tmp_path: Path) -> None:
    oracle = save(TINY_MODELS[name], tmp_path)
    prefill, decode = load(tmp_path, 4), load(tmp_path, 4)
    prompt = random_prompt(37)
    there, here = sequence(prefill, prompt, ANSWER), sequence(decode, prompt, ANSWER)
    here.lease.pages.reverse()
    token = prefill.step({there: len(prompt)})[0]
    assert token is not None
    decode.kv[here.lease.held] = prefill.kv[there.lease.held]
    here.computed = len(prompt)
    here.append(token)
    while here.generated < ANSWER:
        here.append(decode.step({here: 1})[0] or 0)
    assert here.tokens[len(prompt) :] == generate_with_transformers(oracle, prompt, ANSWER)


def test_a_stale_page_of_another_sequence_does_not_show(tmp_path: Path) -> None:
    save(TINY_MODELS["mistral-window"], tmp_path)
    clean, dirty = load(tmp_path), load(tmp_path)
    dirty.kv.normal_(std=30.0)
    assert serve(dirty, PROMPTS, ANSWER, 9) == serve(clean, PROMPTS, ANSWER, 9)

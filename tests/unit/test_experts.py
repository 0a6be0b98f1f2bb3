"""Mixtures of experts: routers against transformers', and what checkpoints and configs hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_loop import answer, load
from tiny_models import TINY_MODELS, TinyModel, generate_with_transformers, save
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from baton.core.errors import BatonError, InvalidCheckpoint, InvalidConfig, UnsupportedModel
from baton.engine.architecture import read_architecture
from baton.engine.rotations import separate_pairs
from baton.kernels.experts import ExpertBiases, Experts, route
from baton.kernels.linear import Linear, RMSNorm
from baton.kernels.routing import Routing

PROMPT = [3, 14, 15, 92, 65, 35]
HIDDEN, COLUMNS = 32, 16


def greedy(experts: int) -> Routing:
    return Routing(experts, 3, COLUMNS, shared=2, scale=1.5)


DEEPSEEK: dict[str, tuple[dict[str, object], Routing]] = {
    "v2-greedy": ({"topk_method": "greedy", "n_group": 4, "topk_group": 1}, greedy(20)),
    "v2-groups": (
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        Routing(20, 3, COLUMNS, shared=2, scale=1.5, groups=4, top_groups=2),
    ),
    "v3-groups": (
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        Routing(20, 3, COLUMNS, shared=2, scores="sigmoid", corrected=True, normalized=True,
                scale=1.5, groups=4, top_groups=2, group_best=2),
    ),
    "v3-one-group": (
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        Routing(20, 3, COLUMNS, shared=2, scores="sigmoid", corrected=True, scale=1.5),
    ),
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseeks_mixtures_are_as_in_transformers(name: str) -> None:
    settings, routing = DEEPSEEK[name]
    shape = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": COLUMNS,
        "n_routed_experts": routing.experts,
        "num_experts_per_tok": routing.top_k,
        "n_shared_experts": routing.shared,
        "routed_scaling_factor": routing.scale,
    }
    second = name.startswith("v2")
    config: Any = (DeepseekV2Config if second else DeepseekV3Config)(**shape, **settings)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    oracle: Any = (DeepseekV2Moe if second else DeepseekV3MoE)(config)
    for tensor in (*oracle.parameters(), *oracle.buffers()):
        tensor.normal_(0.0, 0.5)
    experts = Experts(routing, *_weights(oracle, routing))
    x, norm = torch.randn(50, HIDDEN), RMSNorm(torch.rand(HIDDEN), 1e-5)
    torch.testing.assert_close(experts(x, norm), oracle(norm(x)[None])[0], rtol=1e-4, atol=1e-4)
    experts.pack()
    torch.testing.assert_close(experts(x, norm), oracle(norm(x)[None])[0], rtol=1e-4, atol=1e-4)


def _weights(oracle: Any, routing: Routing) -> tuple[Any, ...]:
    shared = oracle.shared_experts
    both = torch.stack([shared.gate_proj.weight, shared.up_proj.weight])
    ups = both.view(2, routing.shared, COLUMNS, HIDDEN).transpose(0, 1).flatten(1, 2)
    downs = shared.down_proj.weight.view(HIDDEN, routing.shared, COLUMNS).transpose(0, 1)
    return (
        Linear(oracle.gate.weight),
        oracle.gate.e_score_correction_bias if routing.corrected else None,
        torch.cat((oracle.experts.gate_up_proj, ups)),
        torch.cat((oracle.experts.down_proj, downs)),
    )


@torch.inference_mode()
def test_gpt_oss_mixture_is_as_in_transformers() -> None:
    """With numbers beyond the limits of its activation."""
    routing = Routing(8, 3, COLUMNS, normalized=True, biased=True)
    shape = {"hidden_size": HIDDEN, "intermediate_size": COLUMNS}
    config: Any = GptOssConfig(**shape, num_local_experts=8, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    oracle: Any = GptOssMLP(config)
    for tensor in oracle.parameters():
        tensor.normal_(0.0, 1.0)
    theirs = oracle.experts
    experts = Experts(
        routing,
        Linear(oracle.router.weight, oracle.router.bias),
        None,
        separate_pairs(theirs.gate_up_proj).transpose(1, 2).contiguous(),
        theirs.down_proj.transpose(1, 2).contiguous(),
        "clamped_swiglu",
        ExpertBiases(separate_pairs(theirs.gate_up_proj_bias), theirs.down_proj_bias),
    )
    x, norm = torch.randn(50, HIDDEN), RMSNorm(torch.rand(HIDDEN), 1e-5)
    wanted = oracle(norm(x)[None])[0][0]
    torch.testing.assert_close(experts(x, norm), wanted, rtol=1e-4, atol=1e-4)
    experts.pack()
    torch.testing.assert_close(experts(x, norm), wanted, rtol=1e-4, atol=1e-4)
    theirs.limit = 100.0
    assert not torch.allclose(oracle(norm(x)[None])[0][0], wanted, atol=1.0)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_after_experts_is_of_their_sum(dtype: torch.dtype) -> None:
    routing = greedy(8)
    experts = Experts(
        routing,
        Linear(torch.randn(routing.outputs, HIDDEN).to(dtype)),
        None,
        torch.randn(routing.every, 2 * COLUMNS, HIDDEN).to(dtype),
        torch.randn(routing.every, HIDDEN, COLUMNS).to(dtype),
        "gelu_tanh",
    )
    experts.pack()
    x, after = torch.randn(20, HIDDEN).to(dtype), RMSNorm(torch.rand(HIDDEN).to(dtype), 1e-5)
    wanted = x + after(experts(x, None).to(dtype))
    torch.testing.assert_close(experts.add_to(x, None, after), wanted)


@pytest.mark.parametrize("groups", [1, 4])
def test_equal_scores_go_to_the_lowest_ids(groups: int) -> None:
    routing = Routing(16, 3, 8, groups=groups, top_groups=min(groups, 2))
    chosen, weights = route(torch.zeros(2, 16), routing, None)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[1 / 16] * 3] * 2


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "dots1"])
def test_experts_stored_as_one_tensor_are_read_too(name: str, tmp_path: Path) -> None:
    """As publishers store them, and as transformers holds them."""
    oracle = save(TINY_MODELS[name], tmp_path)
    wanted = generate_with_transformers(oracle, PROMPT, 12)
    assert answer(load(tmp_path), PROMPT, 12) == wanted
    oracle.save_pretrained(tmp_path, save_original_format=False)
    assert answer(load(tmp_path), PROMPT, 12) == wanted


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save(TINY_MODELS["mixtral"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    with pytest.raises(InvalidCheckpoint, match=r"gate.weight has shape \[5, 48\]|experts.5.w1"):
        load(tmp_path)


REFUSED: dict[str, tuple[dict[str, object], type[BatonError], str]] = {
    "too many": ({"num_experts_per_tok": 7}, InvalidConfig, "7 experts per token cannot be chosen"),
    "no count": ({"num_experts": "8"}, InvalidConfig, "'num_experts' must be a whole number"),
    "no step": ({"decoder_sparse_step": 0}, InvalidConfig, "decoder_sparse_step must not be 0"),
    "odd shared": ({"shared_expert_intermediate_size": 30}, UnsupportedModel, "must be a multiple"),
    "no size": ({"moe_intermediate_size": 0}, InvalidConfig, "a mixture needs"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_mixture_that_cannot_be_is_refused(why: str, tmp_path: Path) -> None:
    changes, error, message = REFUSED[why]
    _write(tmp_path, TINY_MODELS["qwen2-moe"], changes)
    with pytest.raises(error, match=message):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 5}, "12 experts cannot form 5 groups evenly"),
        ({"topk_group": 5}, "5 of 4 groups"),
        ({"n_group": 12, "topk_group": 3}, "a group needs 2 experts"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    _write(tmp_path, TINY_MODELS["dots1"], changes)
    with pytest.raises(InvalidConfig, match=message):
        read_architecture(tmp_path)


def test_no_experts_are_an_mlp_in_every_layer(tmp_path: Path) -> None:
    _write(tmp_path, TINY_MODELS["qwen2-moe"], {"num_experts": 0})
    shape = read_architecture(tmp_path)
    assert (shape.routing, shape.sparse) == (None, (False,) * 3)


def _write(folder: Path, model: TinyModel, changes: dict[str, object]) -> None:
    values = {
        "model_type": model.family,
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **model.settings,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(values))

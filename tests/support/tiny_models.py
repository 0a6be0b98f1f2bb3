"""Tiny models with random weights, saved as Hugging Face folders.

The weights vary enough (norms and biases too) that greedy answers wander
through the vocabulary and every feature of a config moves them.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

VOCABULARY = 199

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}

_YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


@dataclass(frozen=True)
class TinyModel:
    """A model family and its settings beyond the common shape."""

    family: str
    settings: dict[str, object] = field(default_factory=dict)

    def changed(self, **changes: object) -> TinyModel:
        """The same model with some settings changed."""
        return TinyModel(self.family, {**self.settings, **changes})


TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama", {"num_key_value_heads": 4}),
    "llama-tied-mqa": TinyModel("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-head-dim": TinyModel("llama", {"head_dim": 32}),
    "llama-biases": TinyModel("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": TinyModel(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear-rope": TinyModel(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
    ),
    "llama-yarn-rope": TinyModel(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2-yarn-mscale": TinyModel(
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 2.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
    ),
    "mistral-window": TinyModel("mistral", {"sliding_window": 11}),
    "qwen2": TinyModel("qwen2", {"num_attention_heads": 6, "hidden_size": 48, "head_dim": 8}),
    "qwen2-late-windows": TinyModel(
        "qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen2-layer-types": TinyModel(
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": TinyModel("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-windows": TinyModel(
        "qwen3",
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": TinyModel("smollm3", {"no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    "smollm3-windows": TinyModel(
        "smollm3",
        {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 10},
    ),
    "granite": TinyModel(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "llama-dynamic-rope": TinyModel(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
    ),
    "olmo2": TinyModel("olmo2", {"attention_bias": True}),
    "phi3": TinyModel("phi3", {"sliding_window": 13}),
    "phi3-partial": TinyModel(
        "phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.67}}
    ),
    "phi3-long": TinyModel(
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "attention_factor": 1.2,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
            },
        },
    ),
    "gemma2": TinyModel(
        "gemma2",
        {
            "head_dim": 16,
            "tie_word_embeddings": False,  # tied ones repeat themselves
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": TinyModel(
        "gemma3_text",
        {
            "head_dim": 256,
            "tie_word_embeddings": False,
            "sliding_window": 12,
            "query_pre_attn_scalar": 100,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "ministral": TinyModel(
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": TinyModel("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": TinyModel(
        "mixtral",
        {"num_local_experts": 4, "sliding_window": 11, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "qwen2-moe": TinyModel(
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe-windows": TinyModel(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": TinyModel(
        "qwen3_moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "qwen3-moe-steps": TinyModel(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "dots1": TinyModel(
        "dots1",
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v2-lite": TinyModel("deepseek_v2", {**_LATENT, "rope_parameters": _YARN}),
    "deepseek-v2": TinyModel(
        "deepseek_v2",
        {
            **_LATENT,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 24,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3": TinyModel(
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "rope_parameters": {**_YARN, "mscale": 1.5, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek-v3-halves": TinyModel(
        "deepseek_v3",
        {**_LATENT, "kv_lora_rank": 40, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "dots1-one-group": TinyModel(
        "dots1",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
        },
    ),
    "gpt-oss": TinyModel(
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e3,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gpt-oss-full": TinyModel(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 3,
        },
    ),
}


MXFP4 = TINY_MODELS["gpt-oss"].changed(hidden_size=64, intermediate_size=96)
"""Of whole blocks of 32."""


def build(model: TinyModel, seed: int = 0) -> PreTrainedModel:
    """The model in transformers, float32. The seed and the tensors' names decide the weights."""
    config = AutoConfig.for_model(model.family, **{**_SHAPE, **model.settings})
    if model.settings.get("attn_logit_softcapping"):
        config._attn_implementation = "eager"  # transformers' default may leave the cap out
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(built.named_parameters()):
            generator.manual_seed(seed * 1000 + index)
            noise = torch.randn(parameter.shape, generator=generator)
            norm = ("norm" in name or "ln_" in name) and not name.endswith("bias")
            parameter.copy_(1.0 + 0.3 * noise if norm else 0.3 * noise)
        for name, buffer in built.named_buffers():
            if name.endswith("e_score_correction_bias"):
                generator.manual_seed(seed)
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return built


_SAVED: dict[str, tuple[PreTrainedModel, tempfile.TemporaryDirectory[str]]] = {}


def save(model: TinyModel, folder: Path, seed: int = 0, shard_size: str = "5GB") -> PreTrainedModel:
    """Writes the model's folder and returns the model. A model is made once in a process; the
    caller gets copies, to change as it likes."""
    key = repr((model, seed, shard_size))
    if key not in _SAVED:
        built, kept = build(model, seed), tempfile.TemporaryDirectory()
        built.save_pretrained(kept.name, max_shard_size=shard_size)
        _SAVED[key] = built, kept
    built, kept = _SAVED[key]
    shutil.copytree(kept.name, folder, dirs_exist_ok=True)
    return copy.deepcopy(built)


def save_mxfp4(folder: Path, seed: int = 0, model: TinyModel | None = None) -> PreTrainedModel:
    """Writes the folder of a gpt-oss with experts in MXFP4, blocks in one file and scales in
    another; returns the model as transformers dequantizes it."""
    save(model or MXFP4, folder, seed)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    generator, scales = torch.Generator().manual_seed(seed), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        size = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=generator).byte()
        scales[f"{name}_scales"] = torch.randint(122, 126, size, generator=generator).byte()
    files = {"model-1.safetensors": tensors, "model-2.safetensors": scales}
    for file, held in files.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    names = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    plain = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=plain).float()


def change_config(folder: Path, **changes: object) -> None:
    """Sets keys of a saved config.json; None removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def generate_with_transformers(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The oracle: the greedy answer of `count` tokens."""
    answer = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def choices_of_transformers(
    model: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]
) -> list[list[int]]:
    """The oracle's choice at each place of an answer, given what stands before: equal to the
    answers if, and only if, they are its greedy ones, at a tenth of the cost of generating them."""
    with torch.inference_mode():
        return [
            model(torch.tensor([prompt + answer[:-1]]))
            .logits[0, len(prompt) - 1 :]
            .argmax(-1)
            .tolist()
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

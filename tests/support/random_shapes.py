"""Shapes of models with random weights, small but for their kinds of layers."""

from __future__ import annotations

import json
from pathlib import Path

from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings
from baton.engine.model_choice import KvDtype

CONTEXT, VOCABULARY = 4096, 4000
SMALL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SHAPES = {
    "small": SMALL,
    "llama-8b": SMALL
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2": SMALL | {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14,
                      "num_key_value_heads": 2, "intermediate_size": 4864},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 128},
    "mistral": SMALL | {"model_type": "mistral", "head_dim": 64, "sliding_window": 300},
    "granite": SMALL | {"model_type": "granite", "residual_multiplier": 0.22, "logits_scaling": 6.0,
                        "embedding_multiplier": 12.0, "attention_multiplier": 0.02},
    "olmo2": SMALL | {"model_type": "olmo2"},
    "phi3": SMALL | {"model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 6,
                     "partial_rotary_factor": 0.75},
    "gemma2": SMALL | {"model_type": "gemma2", "head_dim": 256, "sliding_window": 300},
    "gemma3": SMALL | {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 300,
                       "sliding_window_pattern": 2},
    "qwen3-moe": SMALL | {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128,
                          "num_experts_per_tok": 8, "moe_intermediate_size": 192,
                          "norm_topk_prob": True},
    "deepseek-v2": SMALL | {"model_type": "deepseek_v2", "num_attention_heads": 16,
                            "hidden_size": 512, "q_lora_rank": None, "num_experts_per_tok": 6,
                            "moe_intermediate_size": 192, "first_k_dense_replace": 1},
    "deepseek-v3": SMALL | {"model_type": "deepseek_v3", "num_attention_heads": 32,
                            "hidden_size": 512, "q_lora_rank": 384, "n_routed_experts": 32,
                            "num_experts_per_tok": 4, "moe_intermediate_size": 192,
                            "first_k_dense_replace": 1},
    "dots1": SMALL | {"model_type": "dots1", "head_dim": 64, "n_routed_experts": 24,
                      "num_experts_per_tok": 4, "moe_intermediate_size": 384, "n_group": 4,
                      "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "gpt-oss": SMALL | {"model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 16,
                        "num_experts_per_tok": 4, "intermediate_size": 288,
                        "num_attention_heads": 24},
}  # fmt: skip


def load_on_gpu(
    name: str, folder: Path, gpu: GpuSettings, kv_dtype: KvDtype, **changes: int
) -> Engine:
    """A model of that shape with random weights, which depend on the names of tensors alone."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | changes))
    return Engine.load(
        folder,
        device="cuda",
        dtype="bfloat16",
        random_weights=True,
        kv_memory=64 << 20,
        gpu=gpu,
        kv_dtype=kv_dtype,
    )

"""Configurations of small models, each with kernels of its own on a GPU."""

from __future__ import annotations

CONTEXT = 8192
SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 6000,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
EXPERTS = SHAPE | {
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
SINKS = SHAPE | {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "intermediate_size": 128,
}
LATENTS = SHAPE | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 96,
    "n_routed_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}

"""Tiny models of families that only transformers knows how to run."""

from __future__ import annotations

from tiny_models import VOCABULARY, TinyModel

_SHAPE: dict[str, object] = {"hidden_size": 64, "tie_word_embeddings": False}
_MLA: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS: dict[str, object] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}

FOREIGN_MODELS: dict[str, TinyModel] = {
    "gemma": TinyModel("gemma", _SHAPE | {"head_dim": 16}),
    "gpt2": TinyModel("gpt2", _SHAPE | {"n_inner": 96}),
    "gpt2-padding": TinyModel("gpt2", _SHAPE | {"n_inner": 96, "pad_token_id": 0}),
    "gpt_bigcode": TinyModel("gpt_bigcode", _SHAPE),
    "gpt_neox": TinyModel("gpt_neox", _SHAPE),
    "opt": TinyModel("opt", _SHAPE | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": TinyModel("phi", _SHAPE),
    "stablelm": TinyModel("stablelm", _SHAPE),
    "starcoder2": TinyModel("starcoder2", _SHAPE | {"sliding_window": 11}),
    "cohere": TinyModel("cohere", _SHAPE),
    "cohere2": TinyModel("cohere2", _SHAPE | {"sliding_window": 9, "num_hidden_layers": 4}),
    "ernie4_5": TinyModel("ernie4_5", _SHAPE | {"head_dim": 16}),
    "exaone4": TinyModel("exaone4", _SHAPE | {"sliding_window": 9, "num_hidden_layers": 4}),
    "glm4": TinyModel("glm4", _SHAPE | {"head_dim": 16}),
    "nemotron": TinyModel("nemotron", _SHAPE),
    "olmo": TinyModel("olmo", _SHAPE),
    "olmo3": TinyModel("olmo3", _SHAPE | {"sliding_window": 9, "num_hidden_layers": 4}),
    "olmoe": TinyModel("olmoe", _SHAPE | _EXPERTS | {"num_experts": 4}),
    "seed_oss": TinyModel("seed_oss", _SHAPE | {"head_dim": 16}),
    "glm4_moe": TinyModel(
        "glm4_moe", _SHAPE | _EXPERTS | {"head_dim": 16, "n_routed_experts": 4, "n_group": 1}
    ),
    "minimax_m2": TinyModel("minimax_m2", _SHAPE | _EXPERTS | {"head_dim": 16}),
    "lfm2-full": TinyModel("lfm2", {"layer_types": ["full_attention"] * 3}),
    "minicpm3-short-values": TinyModel("minicpm3", _SHAPE | _MLA),
}
REFUSED_MODELS: dict[str, tuple[TinyModel, str]] = {
    "mamba": (TinyModel("mamba", {"state_size": 4}), "MambaForCausalLM keeps a state"),
    "falcon_h1": (
        TinyModel(
            "falcon_h1",
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        ),
        "FalconH1ForCausalLM keeps a state",
    ),
    "chunked": (
        TinyModel(
            "llama4_text",
            {"hidden_size": 64, "head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2},
        ),
        "Llama4ForCausalLM cannot be served: it does not attend to all tokens",
    ),
    "attention of its own": (
        TinyModel("falcon", {"hidden_size": 64}),
        "FalconForCausalLM does not use transformers' attention interface",
    ),
    "attention twice a layer": (
        TinyModel("diffllama", {"hidden_size": 64}),
        "DiffLlamaForCausalLM attends 6 times in 3 layers",
    ),
    **{
        f"positions behind the padding, {family}": (
            TinyModel(family, {"is_decoder": True, "hidden_size": 64}),
            r"\w+ForCausalLM numbers tokens from after the padding token's id",
        )
        for family in ("roberta", "xlm-roberta", "camembert")
    },
    "no positions": (
        TinyModel("bloom", {"hidden_size": 64, "n_head": 4}),
        "BloomForCausalLM takes no positions",
    ),
    "convolutions": (
        TinyModel("lfm2", {"layer_types": ["conv", "conv", "full_attention"]}),
        "Lfm2ForCausalLM keeps more than keys and values",
    ),
    "layers that differ": (
        TinyModel(
            "gemma4_text",
            {
                "hidden_size": 64,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCABULARY,
                "per_layer_config": {"02": {"head_dim": 32}},
                "head_dim": 16,
            },
        ),
        "layers of different heads or sizes",
    ),
    "a window that is not used": (
        TinyModel("arcee", {"hidden_size": 64, "sliding_window": 9}),
        "a sliding_window of 9 is not used",
    ),
    "dynamic scaling": (
        TinyModel(
            "phi",
            {
                "hidden_size": 64,
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 10_000.0,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        ),
        "dynamic RoPE scaling",
    ),
}
"""With what the refusal says."""

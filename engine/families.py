"""The families of models that run natively: one row of FAMILIES each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from baton.kernels.routing import Scores


class LayerNorms(NamedTuple):
    """Tensor names of a layer's norms: of the inputs of attention and the MLP, and (`_after`) of
    what these add to the residual. None: no such norm."""

    attention: str | None = "input_layernorm"
    attention_after: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_after: str | None = None


NORMS_BEFORE = LayerNorms()
NORMS_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS_AROUND = LayerNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

QueryKeyNorm = Literal["none", "head", "projection"]
"""Norms of queries and keys: none, of each head, or of all heads together."""


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes a family of models."""

    class_name: str
    assumed: dict[str, object]  # values of keys that config.json lacks
    fixed: dict[str, object] = field(default_factory=dict)  # values that override config.json
    qkv_bias: bool | None = False  # None: as config.json says
    query_key_norm: QueryKeyNorm = "none"
    norms: LayerNorms = NORMS_BEFORE
    norm_offset: float = 0.0  # added to the weights of norms
    embedding_root: bool = False  # embeddings times the root of their size, in the model's dtype
    activation: str = "hidden_act"  # the key that names it
    fused: bool = False  # the checkpoint keeps qkv_proj and gate_up_proj
    windows: Literal["none", "all", "typed", "late", "unrotated", "pattern", "alternate"] = "none"
    skips_rotation: bool = False
    partial_rotary: bool = False
    local_rope: bool = False  # layers with a window have a rope of their own
    rope_names: dict[str, str] = field(default_factory=dict)  # other names of RoPE scalings
    latent: bool = False  # latent attention
    router: Scores | None = None  # None: no experts
    expert_counts: tuple[str, ...] = ("num_experts", "num_local_experts")  # keys of their number
    shared_gate: bool = False
    expert_biases: bool = False  # of experts and of their router
    interleaved: bool = False  # the checkpoint keeps experts as [inputs, outputs], gate, up in turn
    sinks: bool = False  # each head has a score of no token
    harmless: dict[str, tuple[object, ...]] = field(default_factory=dict)  # in addition to HARMLESS


ASSUMED: dict[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
}
"""Values that every family assumes for keys that config.json lacks."""

_QWEN: dict[str, object] = {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
_QWEN |= {"sliding_window": 4096}
_GEMMA: dict[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}

_NO_GROUPS: dict[str, object] = dict.fromkeys(
    ("n_group", "topk_group", "topk_method", "routed_scaling_factor", "n_shared_experts")
)
_NO_GROUPS |= {"first_k_dense_replace": None}
_NO_SHARED: dict[str, object] = {"shared_expert_intermediate_size": None}
_NO_STEPS: dict[str, object] = {"mlp_only_layers": None, "decoder_sparse_step": None}
"""Keys that only other mixtures of experts have."""

_AS_MIXTRAL: dict[str, object] = {
    **(_NO_GROUPS | _NO_SHARED | _NO_STEPS),
    "moe_intermediate_size": None,
    "norm_topk_prob": True,
    "use_sliding_window": True,
}
_LATENT: dict[str, object] = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
_LATENT |= dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 128)

_MISTRAL = Family(
    "MistralForCausalLM",
    {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": True},
    windows="all",
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048}),
    "mistral": _MISTRAL,
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _QWEN,
        fixed={"attention_bias": False, "mlp_bias": False},
        qkv_bias=True,
        windows="late",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN, "head_dim": 128},
        fixed={"mlp_bias": False},
        query_key_norm="head",
        windows="late",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
        windows="unrotated",
        skips_rotation=True,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        fixed={"mlp_bias": False},
        query_key_norm="projection",
        norms=NORMS_AFTER,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": True},
        fused=True,
        windows="all",
        partial_rotary=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fixed={"mlp_bias": False, "use_sliding_window": True, "sliding_window_pattern": 2},
        norms=NORMS_AROUND,
        norm_offset=1.0,
        embedding_root=True,
        activation="hidden_activation",
        windows="pattern",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        fixed={"mlp_bias": False, "use_sliding_window": True},
        query_key_norm="head",
        norms=NORMS_AROUND,
        norm_offset=1.0,
        embedding_root=True,
        activation="hidden_activation",
        windows="pattern",
        local_rope=True,
    ),
    "ministral": replace(_MISTRAL, class_name="MinistralForCausalLM", windows="typed"),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        fixed={**_AS_MIXTRAL, "attention_bias": False},
        windows="all",
        router="softmax",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            **_QWEN,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        fixed={**_NO_GROUPS, "attention_bias": False, "mlp_bias": False},
        qkv_bias=None,
        windows="alternate",
        expert_counts=("num_experts",),
        router="softmax",
        shared_gate=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fixed={**_NO_GROUPS, **_NO_SHARED, "mlp_bias": False},
        query_key_norm="head",
        windows="all",
        router="softmax",
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "max_window_layers": 62,
            "sliding_window": 4096,
            "moe_intermediate_size": 1408,
        },
        fixed={
            **_NO_SHARED,
            **_NO_STEPS,
            "mlp_bias": False,
            "topk_method": None,
            "use_sliding_window": True,
        },
        query_key_norm="head",
        windows="late",
        expert_counts=("num_local_experts", "n_routed_experts"),
        router="sigmoid",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        fixed={**_AS_MIXTRAL, "hidden_act": "clamped_swiglu", "sliding_window_pattern": 2},
        windows="pattern",
        router="softmax",
        expert_biases=True,
        interleaved=True,
        sinks=True,
        harmless={"swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, None)},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            **_LATENT,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "moe_intermediate_size": 1407,
        },
        fixed={**_NO_SHARED, **_NO_STEPS, "norm_topk_prob": False, "rope_interleave": True},
        latent=True,
        expert_counts=("num_experts", "n_routed_experts"),
        router="softmax",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "max_position_embeddings": 4096,
            "rope_interleave": True,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 2048,
        },
        fixed={**_NO_SHARED, **_NO_STEPS, "mlp_bias": False, "topk_method": None},
        latent=True,
        expert_counts=("num_local_experts", "n_routed_experts"),
        router="sigmoid",
    ),
}

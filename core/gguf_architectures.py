"""How GGUF files of each architecture map to Hugging Face's names: a row of ARCHITECTURES each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.errors import UnsupportedModel
from baton.core.gguf_file import GgufFile

Json = dict[str, object]

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of the rotary embedding, which are not weights."""

EXPERT = "{expert}"
"""Placeholder for an expert's number. A GGUF file has all experts in one tensor."""

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_EXPERT_COUNTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GELU: Json = {"hidden_activation": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What distinguishes the files of an architecture. Fields are named without their prefix."""

    model_type: str
    adjacent_pairs: bool = False  # the two rows of a rotary pair in query and key projections
    norm_offset: float = 0.0  # added to the weights of norms in the file
    tensors: Mapping[str, str] = field(default_factory=dict)  # of a layer, besides the usual ones
    counts: Mapping[str, str] = field(default_factory=dict)  # whole numbers for config.json
    decimals: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, object] = field(default_factory=dict)  # for config.json, not in the file
    wide_layers: int | None = (
        None  # with this many layers, scores are scaled by hidden_size / heads
    )
    local_rope: bool = False  # layers with a window have their own RoPE base
    partial_rotary: bool = False
    window_pattern: int = 0  # each layer of this number has no window; 0: all layers are the same

    def weight_name(self, name: str) -> str:
        """The Hugging Face name of a GGUF tensor such as "blk.7.attn_q.weight"."""
        layer_tensors = _LAYER_TENSORS | dict(self.tensors)
        match name.split("."):
            case ["blk", layer, part, ("weight" | "bias") as kind] if part in layer_tensors:
                return f"model.layers.{layer}.{layer_tensors[part]}.{kind}"
            case _ if name in _OUTER_TENSORS:
                return _OUTER_TENSORS[name]
        raise UnsupportedModel(f"GGUF tensor {name!r} is not of a supported model")


_LLAMA = GgufArchitecture("llama", adjacent_pairs=True)
_MIXTRAL = dataclasses.replace(
    _LLAMA, model_type="mixtral", tensors=_EXPERTS, counts=_EXPERT_COUNTS
)
_GEMMA2 = GgufArchitecture(
    "gemma2",
    norm_offset=1.0,
    tensors={**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
    counts=_WINDOW,
    decimals={**_FINAL_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
    stated=_GELU,
    wide_layers=46,
    window_pattern=2,
)

ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "smollm3": GgufArchitecture("smollm3", adjacent_pairs=True),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        tensors={**_EXPERTS, **_SHARED_EXPERT},
        counts={
            **_EXPERT_COUNTS,
            "expert_count": "num_experts",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe", tensors=_EXPERTS, counts=_EXPERT_COUNTS, stated={"norm_topk_prob": True}
    ),
    "gemma2": _GEMMA2,
    "gemma3": dataclasses.replace(
        _GEMMA2,
        model_type="gemma3_text",
        decimals=_FINAL_CAP,
        wide_layers=62,
        local_rope=True,
        window_pattern=6,
    ),
    "phi3": GgufArchitecture(
        "phi3",
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        counts=_WINDOW,
        partial_rotary=True,
    ),
    "olmo2": GgufArchitecture("olmo2", tensors=_NORMS_AFTER),
    "granite": GgufArchitecture(
        "granite",
        adjacent_pairs=True,
        decimals={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
}


_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # not stated, or softmax
    **dict.fromkeys(
        ("attention.output_scale", "expert_weights_scale", "experts_per_group"), (0, 1)
    ),
    **dict.fromkeys(("expert_group_count", "interleave_moe_layer_step"), (0, 1)),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    **dict.fromkeys(
        (
            *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers"),
            *("attention.temperature_length", "attention.temperature_scale"),
            *("leading_dense_block_count", "nextn_predict_layers", "router_logit_softcapping"),
            *("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier", "use_parallel_residual"),
        ),
        (0,),
    ),
}
"""Fields that change what a model computes and that nothing here obeys, with the values that change
nothing."""


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Raises UnsupportedModel for an architecture, or a field of it, that is not served."""
    name = file.field("general.architecture", str)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    mixture = name == "llama" and file.field(f"{name}.expert_count", int, 0)
    found = _MIXTRAL if mixture else ARCHITECTURES[name]
    for other in {"rope.scale_linear", *_all_fields()} - {*found.counts, *found.decimals}:
        if file.field(f"{name}.{other}", float, 0.0):
            raise UnsupportedModel(f"GGUF field {name}.{other} is not supported")
    usual = {"attention.sliding_window_pattern": (found.window_pattern,)}
    for other, neutral in {**_NEUTRAL, **usual}.items():
        if f"{name}.{other}" in file and file.field(f"{name}.{other}", float) not in neutral:
            raise UnsupportedModel(f"GGUF field {name}.{other} is not supported")
    return found


def _all_fields() -> set[str]:
    """Names of the fields that change what a model computes."""
    every = ARCHITECTURES.values()
    return {name for each in every for part in (each.counts, each.decimals) for name in part}

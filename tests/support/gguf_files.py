"""Writes tiny models as GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from sentencepiece import SentencePieceProcessor
from text_model import CHAT_TEMPLATE, END, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

Array = npt.NDArray[np.generic]
Vocabulary = Callable[[GGUFWriter], None]

SHAPE: dict[str, object] = {
    "hidden_size": 256,  # rows that K-quants can have
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
"""Where it is not the model type."""

ADJACENT_PAIRS = ("llama", "smollm3", "granite")
"""Architectures whose converter permutes the rows of queries and keys."""

# Where the float16 scales of a block are, among bytes that may have any value, and how large they
# must be for values around zero: the second, if any, scales what is subtracted.
K_SCALES = {
    GGMLQuantizationType.Q2_K: {80: 2e-2, 82: 3e-2},
    GGMLQuantizationType.Q3_K: {108: 5e-3},
    GGMLQuantizationType.Q4_K: {0: 1e-3, 2: 7.5e-3},
    GGMLQuantizationType.Q5_K: {0: 5e-4, 2: 7.75e-3},
    GGMLQuantizationType.Q6_K: {208: 1e-4},
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    vocabulary: Vocabulary | None = None,
    extra: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """`extra` adds fields or tensors."""
    architecture = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    writer = GGUFWriter(path, architecture)
    _add_shape(writer, model)
    _add_own_fields(writer, model.config)
    if vocabulary:
        vocabulary(writer)
    for name, values in _tensors(model, architecture):
        chosen = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, _quantized(values, chosen), raw_dtype=chosen)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(whole: Path, parts: list[Path]) -> None:
    """Moves the tensors of the second layer to a file of their own."""
    reader = GGUFReader(whole)
    for part, path in enumerate(parts):
        writer = GGUFWriter(path, "llama")
        for name, field in reader.fields.items():
            if part == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                kind = field.types[0]
                sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub_type=sub)
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.1.") == bool(part):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def load_with_transformers(file: Path, **ignored: object) -> PreTrainedModel:
    """As `from_pretrained` with `gguf_file` does, which needs accelerate as well. `ignored`: what
    the file says of the config and transformers does not take from it."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    for key, value in ignored.items():
        setattr(config, key, value)
    config._attn_implementation = "eager"  # which has caps
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    report = model.load_state_dict(state, strict=False)
    assert report.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    assert not report.unexpected_keys
    model.generation_config.eos_token_id = None  # answers have the length that is asked for
    return model


def _add_shape(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    _add_rope(writer, config.rope_parameters, head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_rope(writer: GGUFWriter, rope: dict[str, Any], head_dim: int) -> None:
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _add_own_fields(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """As the converters of mixtures, Gemma, Phi and Granite add them."""
    adds = {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }
    if config.model_type in ("gemma2", "gemma3_text", "phi3"):
        adds["sliding_window"] = writer.add_sliding_window
    done = set()
    for key, add in adds.items():
        value = getattr(config, key, None)
        if value is not None and add.__name__ not in done:
            add(value)
            done.add(add.__name__)


def _tensors(
    model: PreTrainedModel, architecture: str
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """By their GGUF names, in GGUF's order of rows."""
    config = model.config
    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for stored, values in _separate_experts(model):
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(stored, try_suffixes=(".weight", ".bias")) or "output.weight"
        part = name.split(".")[-2]
        if part in heads and architecture in ADJACENT_PAIRS:
            halves = values.reshape(heads[part], 2, values.shape[0] // heads[part] // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if part.endswith("norm") and architecture.startswith("gemma"):
            values = values + np.float32(1.0)
        yield name, values.squeeze(0) if part == "ffn_gate_inp_shexp" else values


def _separate_experts(model: PreTrainedModel) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"{prefix}{part}_proj.weight", np.ascontiguousarray(half)
        else:
            yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), values


def _quantized(values: npt.NDArray[np.float32], kind: GGMLQuantizationType) -> Array:
    """The library does not quantize to K-quants: those get random codes and small scales."""
    if kind not in K_SCALES:
        return quantize(values, kind)
    block, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(np.abs(values).sum()))
    codes = random.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    spread = random.uniform(0.5, 1.5, (len(codes), 1))
    for start, scale in K_SCALES[kind].items():
        codes[:, start : start + 2] = (scale * spread).astype(np.float16).view(np.uint8)
    return codes.reshape(*values.shape[:-1], -1)


def byte_level(
    pre: str, *, add_bos: bool | None = None, templates: Sequence[Mapping[str, str]] = ()
) -> Vocabulary:
    """The tokenizer of support/text_model.py, with `pre` as its pre-tokenizer. `templates` are
    named ones beside the default."""
    made = tokenizer()
    tokens = sorted(made.get_vocab(), key=made.token_to_id)
    merges = [(token[:-1], token[-1]) for token in tokens if len(token) > 1 and token != END]
    kinds = [TokenType.CONTROL if token == END else TokenType.NORMAL for token in tokens]

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, "<think>"])
        writer.add_token_types([*kinds, TokenType.USER_DEFINED])
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_eos_token_id(tokens.index(END))
        writer.add_bos_token_id(tokens.index(END))
        writer.add_chat_template([{"name": "default", "template": CHAT_TEMPLATE}, *templates])
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    return add


def sentencepiece(file: Path, *, prefixed: bool = True) -> Vocabulary:
    """The tokenizer in a tokenizer.model."""
    made = SentencePieceProcessor(model_file=str(file))
    ids = range(made.vocab_size())

    def kind(token: int) -> TokenType:
        if made.is_unknown(token):
            return TokenType.UNKNOWN
        if made.is_control(token):
            return TokenType.CONTROL
        return TokenType.BYTE if made.is_byte(token) else TokenType.NORMAL

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(prefixed)
        writer.add_tokenizer_pre("default")
        writer.add_token_list([made.id_to_piece(token) for token in ids])
        writer.add_token_scores([made.get_score(token) for token in ids])
        writer.add_token_types([kind(token) for token in ids])
        writer.add_bos_token_id(made.bos_id())
        writer.add_eos_token_id(made.eos_id())
        writer.add_unk_token_id(made.unk_id())

    return add

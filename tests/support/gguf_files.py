"""Writes tiny models as GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from sentencepiece import SentencePieceProcessor
from text_model import CHAT_TEMPLATE, END, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from baton.core.gguf_model import ADJACENT_PAIRS, weight_name

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
    family = model.config.model_type
    writer = GGUFWriter(path, family)
    _add_shape(writer, model)
    if vocabulary:
        vocabulary(writer)
    for name, values in _tensors(model):
        chosen = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, _quantized(values, chosen), raw_dtype=chosen)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_with_transformers(file: Path) -> PreTrainedModel:
    """As `from_pretrained` with `gguf_file` does, which needs accelerate as well."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
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
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _tensors(model: PreTrainedModel) -> list[tuple[str, npt.NDArray[np.float32]]]:
    """By their GGUF names, in GGUF's order of rows."""
    found = []
    values = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    heads = {
        "attn_q": model.config.num_attention_heads,
        "attn_k": model.config.num_key_value_heads,
    }
    for name in _gguf_names(model):
        if weight_name(name) not in values:
            continue
        tensor = values[weight_name(name)]
        part = name.split(".")[-2]
        if part in heads and ADJACENT_PAIRS[model.config.model_type]:
            halves = tensor.reshape(heads[part], 2, tensor.shape[0] // heads[part] // 2, -1)
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if name != "output.weight" or not model.config.tie_word_embeddings:
            found.append((name, tensor))
    return found


def _gguf_names(model: PreTrainedModel) -> list[str]:
    attention = [f"attn_{part}" for part in ("norm", "q", "k", "v", "q_norm", "k_norm", "output")]
    mlp = [f"ffn_{part}" for part in ("norm", "gate", "up", "down")]
    return ["token_embd.weight", "output_norm.weight", "output.weight"] + [
        f"blk.{layer}.{part}.{kind}"
        for layer in range(model.config.num_hidden_layers)
        for part in attention + mlp
        for kind in ("weight", "bias")
    ]


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


def byte_level(pre: str, *, add_bos: bool | None = None) -> Vocabulary:
    """The tokenizer of support/text_model.py, with `pre` as its pre-tokenizer."""
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
        writer.add_chat_template(CHAT_TEMPLATE)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    return add


def sentencepiece(file: Path) -> Vocabulary:
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
        writer.add_tokenizer_pre("default")
        writer.add_token_list([made.id_to_piece(token) for token in ids])
        writer.add_token_scores([made.get_score(token) for token in ids])
        writer.add_token_types([kind(token) for token in ids])
        writer.add_bos_token_id(made.bos_id())
        writer.add_eos_token_id(made.eos_id())
        writer.add_unk_token_id(made.unk_id())

    return add

"""Converts SmolLM2's GGUF file to a Hugging Face model folder.

The folder holds config.json, generation_config.json, model.safetensors in float32, tokenizer.json
and tokenizer_config.json with the chat template.

The formats differ in two ways. GGUF stores the rows of the query and key projections so that each
rotary pair is adjacent; a Hugging Face Llama has the two halves of a head one after the other. And
GGUF only names its pre-tokenizer ("smollm"), which splits digits one by one before the byte-level
step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.core.errors import UnsupportedModel

Weights = npt.NDArray[np.float32]
Json = dict[str, object]
T = TypeVar("T", str, int, float, list[str], list[int])

CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def convert(source: Path, target: Path) -> None:
    """Writes the model of the GGUF file `source` into the existing folder `target`."""
    reader = GGUFReader(source)
    for name, expected in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if field(reader, name, str) != expected:
            raise UnsupportedModel(f"{source.name}: {name} is not {expected!r}")
    save_file(all_weights(reader), target / "model.safetensors", metadata={"format": "pt"})
    # save_file makes the file private; other users' processes must load it too.
    (target / "model.safetensors").chmod(0o644)
    tokenizer(reader).save(str(target / "tokenizer.json"))
    _write_json(target / "config.json", config(reader))
    _write_json(target / "generation_config.json", special_ids(reader))
    _write_json(target / "tokenizer_config.json", tokenizer_config(reader))


def field(reader: GGUFReader, name: str, kind: type[T]) -> T:
    found = reader.get_field(name)
    if found is None:
        raise UnsupportedModel(f"the GGUF file has no field {name}")
    return kind(found.contents())


def config(reader: GGUFReader) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": field(reader, "llama.embedding_length", int),
        "intermediate_size": field(reader, "llama.feed_forward_length", int),
        "num_hidden_layers": field(reader, "llama.block_count", int),
        "num_attention_heads": field(reader, "llama.attention.head_count", int),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv", int),
        "head_dim": field(reader, "llama.rope.dimension_count", int),
        "max_position_embeddings": field(reader, "llama.context_length", int),
        "vocab_size": field(reader, "llama.vocab_size", int),
        # Stored as float32: the shortest decimal that rounds to it is meant.
        "rms_norm_eps": float(
            str(np.float32(field(reader, "llama.attention.layer_norm_rms_epsilon", float)))
        ),
        "rope_theta": field(reader, "llama.rope.freq_base", float),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **special_ids(reader),
    }


def special_ids(reader: GGUFReader) -> Json:
    return {
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id", int),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id", int),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id", int),
    }


def all_weights(reader: GGUFReader) -> dict[str, Weights]:
    heads = {
        "attn_q": field(reader, "llama.attention.head_count", int),
        "attn_k": field(reader, "llama.attention.head_count_kv", int),
    }
    return {weight_name(tensor.name): weight(tensor, heads) for tensor in reader.tensors}


def weight_name(name: str) -> str:
    """The Hugging Face name of the GGUF tensor `name`, as "blk.7.attn_q.weight"."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"
        case _ if name in OUTER_TENSORS:
            return OUTER_TENSORS[name]
    raise UnsupportedModel(f"the GGUF file has an unexpected tensor {name}")


def weight(tensor: ReaderTensor, heads: dict[str, int]) -> Weights:
    values: Weights = dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    return split_halves(values, heads[part]) if part in heads else values


def split_halves(values: Weights, heads: int) -> Weights:
    """values: [heads * dim, columns]; each head's rows x0 y0 x1 y1 .. become x0 x1 .. y0 y1 .."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens = field(reader, "tokenizer.ggml.tokens", list[str])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges(reader)))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = field(reader, "tokenizer.ggml.token_type", list[int])
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return made


def merges(reader: GGUFReader) -> list[tuple[str, str]]:
    """The pairs that BPE merges, best first. GGUF writes each as "left right"."""
    return [m.partition(" ")[::2] for m in field(reader, "tokenizer.ggml.merges", list[str])]


def tokenizer_config(reader: GGUFReader) -> Json:
    tokens = field(reader, "tokenizer.ggml.tokens", list[str])
    return {
        # This class uses tokenizer.json unchanged; a model's own class would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field(reader, "tokenizer.ggml.bos_token_id", int)],
        "eos_token": tokens[field(reader, "tokenizer.ggml.eos_token_id", int)],
        "unk_token": tokens[field(reader, "tokenizer.ggml.unknown_token_id", int)],
        "pad_token": tokens[field(reader, "tokenizer.ggml.padding_token_id", int)],
        "model_max_length": field(reader, "llama.context_length", int),
        "clean_up_tokenization_spaces": False,
        "chat_template": field(reader, "tokenizer.chat_template", str),
    }


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

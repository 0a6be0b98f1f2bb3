"""GGUF files: the same tokens as transformers, which loads the same file; and what is refused."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_loop import load, serve
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import (
    SHAPE,
    Vocabulary,
    byte_level,
    load_with_transformers,
    sentencepiece,
    write_gguf,
    write_parts,
)
from rank_threads import split_engine
from text_model import CHAT_TEMPLATE, END, save_sentencepiece_model, tokenizer
from tiny_models import TinyModel, build, choices_of_transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from baton.core import model_store
from baton.core.config import Config
from baton.core.errors import BatonError, InvalidCheckpoint, ModelNotFound, UnsupportedModel
from baton.core.types import ChatPrompt, Message, Tool
from baton.engine.architecture import read_architecture
from baton.engine.engine import Engine
from baton.router.prompts.text import Text

ANSWER = 8
"""Passes the end of a page of 16 tokens after a prompt of 9."""
SPLIT_ANSWER = 3
VOCABULARY = tokenizer().get_vocab_size() + 1
KINDS = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
]
FAMILIES = {
    "llama": TinyModel("llama", {**SHAPE, "vocab_size": VOCABULARY}),
    "llama-tied": TinyModel(
        "llama", {**SHAPE, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    ),
    "qwen2": TinyModel("qwen2", {**SHAPE, "vocab_size": VOCABULARY}),
    # transformers takes its heads to be this large, whatever the file says.
    "qwen3": TinyModel("qwen3", {**SHAPE, "vocab_size": VOCABULARY, "head_dim": 128}),
}
GEMMA = {**SHAPE, "vocab_size": VOCABULARY, "head_dim": 64, "query_pre_attn_scalar": 64}
GEMMA |= {"sliding_window": 24}
EXPERTS = {**SHAPE, "vocab_size": VOCABULARY, "num_experts_per_tok": 2}
EXPERTS |= {"num_experts": 4, "moe_intermediate_size": 256}
LOADED = {
    # Each with what the file says and transformers does not take from it.
    "qwen2-moe": (
        TinyModel("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 512}),
        ("moe_intermediate_size", "shared_expert_intermediate_size"),
    ),
    "qwen3-moe": (
        TinyModel("qwen3_moe", {**EXPERTS, "head_dim": 64, "norm_topk_prob": True}),
        ("moe_intermediate_size",),
    ),
    "gemma2": (TinyModel("gemma2", GEMMA), ("query_pre_attn_scalar",)),
    "gemma3": (TinyModel("gemma3_text", GEMMA), ("query_pre_attn_scalar",)),
    "phi3": (TinyModel("phi3", {**SHAPE, "vocab_size": VOCABULARY}), ("pad_token_id",)),
    "phi3-window": (
        TinyModel("phi3", {**SHAPE, "vocab_size": VOCABULARY, "sliding_window": 24}),
        ("sliding_window", "pad_token_id"),
    ),
}
ORIGINAL_CONTEXT = 256  # in which LongRoPE is short
OWN_FORMAT = {
    "smollm3": {"num_hidden_layers": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.4,
        "logits_scaling": 6.0,
    },
    "gemma2": {
        **GEMMA,
        "tie_word_embeddings": False,
        "num_hidden_layers": 46,  # as the model whose scores have a scale of their own
        "hidden_size": 96,
        "head_dim": 16,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
    },
    "gemma3_text": {
        **GEMMA,
        "tie_word_embeddings": False,
        "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    "phi3": {
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "long_factor": [1.0 + pair / 8 for pair in range(24)],
            "short_factor": [1.0 + pair / 16 for pair in range(24)],
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
        },
    },
}
"""Settings of models that transformers does not load from GGUF, or not all that the file says."""

TEXTS = [
    "Hello world",
    " 12345 tokens  are  here\n\n\tand null",
    f"user: Hi{END}assistant: <think>true</think>",
    "über naïve 日本語 🎉 can't we've I'LL",
    "def f(x):\n    return {'name': x**2}  # the end",
    "",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "models_folder", lambda: tmp_path / "models")


def prompts(size: int) -> list[list[int]]:
    source = random.Random(size)
    return [[source.randrange(size) for _ in range(length)] for length in (1, 3, 9, 31, 70)]


def check_tokens(file: Path, **ignored: object) -> None:
    """The engine answers as transformers does, whole and split."""
    oracle = load_with_transformers(file, **ignored)
    asked = prompts(oracle.config.vocab_size)
    folder = model_store.locate(str(file))
    expected = serve(load(folder), asked, ANSWER, chunk=32)
    assert expected == choices_of_transformers(oracle, asked, expected)
    assert len({token for tokens in expected for token in tokens}) > 5
    with split_engine(folder, 2, file.parent) as split:
        answers = serve(split.engine, asked, SPLIT_ANSWER, chunk=32)
        assert answers == [tokens[:SPLIT_ANSWER] for tokens in expected]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_gives_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    check_tokens(
        write_gguf(
            tmp_path / "tiny.gguf",
            build(FAMILIES["llama"]),
            GGMLQuantizationType[kind],
            byte_level("llama-bpe"),
        )
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_every_family_gives_the_tokens_of_transformers(
    family: str, kind: str, tmp_path: Path
) -> None:
    check_tokens(
        write_gguf(
            tmp_path / "tiny.gguf",
            build(FAMILIES[family]),
            GGMLQuantizationType[kind],
            byte_level("qwen2"),
        )
    )


@pytest.mark.parametrize("family", LOADED)
def test_every_architecture_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model, ignored = LOADED[family]
    built = build(model)
    if built.config.tie_word_embeddings:  # Large ones repeat the last token.
        built.model.embed_tokens.weight.data.mul_(0.02)
    kind, vocabulary = GGMLQuantizationType.Q8_0, byte_level("qwen2")
    file = write_gguf(tmp_path / "tiny.gguf", built, kind, vocabulary)
    check_tokens(file, **{key: model.settings.get(key) for key in ignored})


@pytest.mark.parametrize("family", OWN_FORMAT)
def test_an_architecture_is_that_of_the_model_in_its_own_format(
    family: str, tmp_path: Path
) -> None:
    """transformers does not load these from GGUF, or ignores a part of the file."""
    oracle = build(TinyModel(family, {**SHAPE, **OWN_FORMAT[family]}))
    folder = model_store.locate(str(write_gguf(tmp_path / "tiny.gguf", oracle)))
    asked = prompts(oracle.config.vocab_size)
    engine = Engine.load(folder, kv_memory=4 << 20, max_context=ORIGINAL_CONTEXT)
    answers = serve(engine, asked, ANSWER, chunk=32)
    assert answers == choices_of_transformers(oracle, asked, answers)


def llama3_factors(writer: GGUFWriter) -> None:
    """As the converter writes them for Llama 3.1: 1 for short waves, 8 for long ones."""
    dim = 64
    waves = 2 * np.pi * 500_000.0 ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert factors.min() == 1
    assert factors.max() == 8
    writer.add_tensor("rope_freqs.weight", factors)


def yarn(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "yarn")
    writer.add_float32("llama.rope.scaling.factor", 4.0)
    writer.add_uint32("llama.rope.scaling.original_context_length", 256)


def yarn_with_betas(writer: GGUFWriter) -> None:
    yarn(writer)
    writer.add_float32("llama.rope.scaling.yarn_ext_factor", 1.0)
    writer.add_float32("llama.rope.scaling.yarn_beta_fast", 8.0)
    writer.add_float32("llama.rope.scaling.yarn_beta_slow", 0.5)


def linear(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_float32("llama.rope.scaling.factor", 2.5)


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        (
            llama3_factors,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}),
        (
            yarn_with_betas,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
            },
        ),
        (linear, {"rope_type": "linear", "factor": 2.5}),
        (
            lambda writer: writer.add_float32("llama.rope.scaling.factor", 2.5),
            {"rope_type": "linear", "factor": 2.5},
        ),
    ],
)
def test_scaled_rotation_is_that_of_the_model_in_its_own_format(
    extra: Vocabulary, scaling: dict[str, object], tmp_path: Path
) -> None:
    """transformers ignores it in a GGUF file."""
    settings = {**SHAPE, "rope_parameters": {"rope_theta": 500_000.0, **scaling}}
    oracle = build(TinyModel("llama", settings))
    file = write_gguf(tmp_path / "tiny.gguf", oracle, extra=extra)
    asked = prompts(oracle.config.vocab_size)
    folder = model_store.locate(str(file))
    assert read_architecture(folder).ropes[0].kind == scaling["rope_type"]
    answers = serve(load(folder), asked, ANSWER, chunk=32)
    assert answers == choices_of_transformers(oracle, asked, answers)


def write_tiny(folder: Path, vocabulary: Vocabulary, size: int = VOCABULARY) -> Path:
    model = build(TinyModel("llama", {"vocab_size": size}))
    return write_gguf(folder / "tiny.gguf", model, vocabulary=vocabulary)


def oracle_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2"])
def test_a_byte_level_tokenizer_is_that_of_transformers(pre: str, tmp_path: Path) -> None:
    file = write_tiny(tmp_path, byte_level(pre, add_bos=False))
    text, oracle = Text.load(model_store.locate(str(file))), oracle_tokenizer(file)
    for sample in TEXTS:
        ids = text.encode(sample)
        assert ids == oracle(sample).input_ids, sample
        assert text.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_a_pre_tokenizer_that_transformers_does_not_know_splits_digits(tmp_path: Path) -> None:
    file = write_tiny(tmp_path, byte_level("smollm"))
    text = Text.load(model_store.locate(str(file)))
    assert [text.decode([token]) for token in text.encode("12 the12")] == [*"12", " the", *"12"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_a_sentencepiece_tokenizer_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()  # transformers prefers a tokenizer beside the file
    save_sentencepiece_model(tmp_path / "other")
    source = tmp_path / "other" / "tokenizer.model"
    vocabulary = sentencepiece(source, prefixed=family != "gemma2")
    model = build(TinyModel(family, {"vocab_size": 320, "pad_token_id": None}))
    file = write_gguf(tmp_path / "tiny.gguf", model, vocabulary=vocabulary)
    text, oracle = Text.load(model_store.locate(str(file))), oracle_tokenizer(file)
    for sample in [*TEXTS, "  two spaces first"]:
        ids = text.encode(sample)
        assert ids[0] == oracle.bos_token_id
        assert ids[1:] == oracle(sample, add_special_tokens=False).input_ids, sample


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [
        ("llama-bpe", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("llama-bpe", False, False),
    ],
)
def test_plain_text_begins_as_the_file_says(
    pre: str, stated: bool | None, expected: bool, tmp_path: Path
) -> None:
    file = write_tiny(tmp_path, byte_level(pre, add_bos=stated))
    text = Text.load(model_store.locate(str(file)))
    first = text.encode("Hello")[0]
    assert (first == text.special_id(END)) == expected


def test_the_chat_template_and_the_end_are_those_of_the_file(tmp_path: Path) -> None:
    text = Text.load(model_store.locate(str(write_tiny(tmp_path, byte_level("qwen2")))))
    chat = ChatPrompt((Message("user", "Hi"),))
    assert text.render(chat) == f"user: Hi{END}assistant: "
    assert "message" in CHAT_TEMPLATE
    assert text.eos_token_ids == {text.special_id(END)}


def test_a_file_may_have_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "with {{ tools[0].function.name }}"}]
    file = write_tiny(tmp_path, byte_level("qwen2", templates=named))
    text = Text.load(model_store.locate(str(file)))
    chat = ChatPrompt((Message("user", "Hi"),))
    assert text.render(chat) == f"user: Hi{END}assistant: "
    assert text.render(replace(chat, tools=(Tool("look"),))) == "with look"


def test_a_file_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build(TinyModel("llama")))
    text = Text.load(model_store.locate(str(file)))
    assert text.encode((1, 2, 3)) == [1, 2, 3]
    assert not text.has_chat_template


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    oracle = build(FAMILIES["llama"])
    whole = write_gguf(tmp_path / "whole.gguf", oracle, vocabulary=byte_level("qwen2"))
    write_parts(whole, [tmp_path / f"big-0000{part}-of-00002.gguf" for part in (1, 2)])
    name = str(tmp_path / "big-00001-of-00002.gguf")
    asked = prompts(VOCABULARY)
    expected = serve(load(model_store.locate(str(whole))), asked, ANSWER, chunk=32)
    assert serve(load(model_store.locate(name)), asked, ANSWER, chunk=32) == expected
    assert model_store.model_name(Config(model=name)) == "big"
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelNotFound, match="big-00002-of-00002"):
        model_store.locate(name)


def test_a_changed_file_is_converted_anew_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    file = write_tiny(tmp_path, byte_level("qwen2"))
    folder = model_store.locate(str(file))
    before = (folder / "config.json").stat()
    assert model_store.locate(str(file)) == folder
    assert (folder / "config.json").stat() == before
    write_gguf(file, build(TinyModel("qwen2")))
    assert model_store.locate(str(file)) == folder
    assert read_architecture(folder).family == "qwen2"
    assert [path.name for path in folder.parent.iterdir() if path.name != ".lock"] == [folder.name]


def refuse(file: Path, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        model_store.locate(str(file))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refuse(tmp_path / "tiny.gguf", "architecture 'mamba' is not supported; supported: llama")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (lambda writer: writer.add_attention_scale(0.5), "attention.scale"),
        (lambda writer: writer.add_sliding_window(64), "sliding_window"),
        (lambda writer: writer.add_causal_attention(False), "attention.causal"),
        (lambda writer: writer.add_clamp_kqv(8.0), "attention.clamp_kqv"),
        (lambda writer: writer.add_expert_weights_scale(2.5), "expert_weights_scale"),
        (
            lambda writer: writer.add_float32("llama.rope.scaling.yarn_attn_factor", 0.7),
            "rope.scaling.yarn_attn_factor",
        ),
        (
            lambda writer: writer.add_float32("llama.rope.scaling.attn_factor", 1.5),
            "rope.scaling.attn_factor",
        ),
        (
            lambda writer: writer.add_uint32("llama.attention.sliding_window_pattern", 2),
            "attention.sliding_window_pattern",
        ),
        (
            lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"),
            "RoPE scaling 'longrope'",
        ),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.full(6, 3, np.float32)),
            "not Llama 3's",
        ),
        (
            lambda writer: writer.add_tensor("blk.0.ssm_a.weight", np.ones(6, np.float32)),
            "blk.0.ssm_a.weight",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(extra: Vocabulary, words: str, tmp_path: Path) -> None:
    refuse(write_gguf(tmp_path / "tiny.gguf", build(TinyModel("llama")), extra=extra), words)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    refuse(write_tiny(tmp_path, byte_level("grok-2")), "pre-tokenizer 'grok-2'")


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    file = write_tiny(tmp_path, byte_level("qwen2"))
    for size in (file.stat().st_size - 1000, 3000, 20, 3):
        os.truncate(file, size)
        with pytest.raises(InvalidCheckpoint, match="is not a whole GGUF file"):
            model_store.locate(str(file))


def test_a_broken_header_is_refused_or_is_a_model(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path, byte_level("qwen2")).read_bytes()
    header = whole.index(b"output_norm.weight")
    refused = 0
    for seed in range(150):
        source, broken = random.Random(seed), bytearray(whole)
        for _ in range(source.choice((1, 1, 2, 8))):
            broken[source.randrange(header)] ^= 1 << source.randrange(8)
        (tmp_path / "broken.gguf").write_bytes(broken)
        try:
            load(model_store.locate(str(tmp_path / "broken.gguf")))
        except BatonError:
            refused += 1
    assert refused > 75


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no file"):
        model_store.locate(str(tmp_path / "none.gguf"))

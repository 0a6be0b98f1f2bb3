"""Tokenizers of other formats than tokenizer.json, against transformers' AutoTokenizer."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from text_model import END, save_sentencepiece_model, tokenizer
from transformers import AutoTokenizer

from baton.core import tokenizer_files
from baton.core.errors import InvalidCheckpoint, UnsupportedModel
from baton.router.prompts.text import Text


def test_a_sentencepiece_model_alone_is_converted(tmp_path: Path) -> None:
    pieces = save_sentencepiece_model(tmp_path)
    text = Text.load(tmp_path)
    ids = text.encode("The lazy fox 界")
    assert ids == [pieces.bos_id(), *pieces.encode("The lazy fox 界")]
    assert text.decode(ids) == "The lazy fox 界"
    streamed = text.detokenizer()
    assert "".join([*(streamed.push([i]) for i in ids), streamed.flush()]) == "The lazy fox 界"


def test_a_tokenizer_of_llama_may_add_no_space_before_text(tmp_path: Path) -> None:
    save_sentencepiece_model(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    for prefixed in (True, False):
        config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": prefixed}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        text, oracle = Text.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        ids = text.encode("The lazy fox")
        assert ids == oracle("The lazy fox")["input_ids"]
        assert text.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "The lazy fox"


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_vocabulary_beside_merges_is_converted_as_in_transformers(
    class_name: str, tmp_path: Path
) -> None:
    model = json.loads(tokenizer().to_str())["model"]
    merges = ["#version: 0.2", *map(" ".join, model["merges"])]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    config = {"tokenizer_class": class_name, "eos_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text, oracle = Text.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for prompt in (f"Hello the name,  12 é{END}", "don't\n\n"):
        assert text.encode(prompt) == oracle(prompt)["input_ids"] != []


def test_a_sentencepiece_model_may_have_the_name_of_xlnets(tmp_path: Path) -> None:
    save_sentencepiece_model(tmp_path)
    (tmp_path / "tokenizer.model").rename(tmp_path / "spiece.model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLNetTokenizer"}')
    text, oracle = Text.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert text.encode("The lazy fox") == oracle("The lazy fox")["input_ids"]


def test_a_tekken_file_is_converted_as_in_transformers(tmp_path: Path) -> None:
    words = [*(bytes([each]) for each in range(256)), b"th", b"the"]
    special = [{"rank": 0, "token_str": "<s>", "is_control": True}]
    tokens = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode()}
        for rank, word in enumerate(words)
    ]
    counts = {"default_vocab_size": len(words) + 1, "default_num_special_tokens": 1}
    config = {"pattern": r"\s+|\S+", "num_vocab_tokens": len(words), "version": "v3", **counts}
    content = {"config": config, "vocab": tokens, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "vocab_size": 300}')
    text, oracle = Text.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert text.encode("the path") == oracle("the path")["input_ids"]
    assert text.decode(text.encode("the path")) == "the path"


@pytest.mark.parametrize(
    ("file", "class_name"),
    [
        ("spiece.model", "Qwen2Tokenizer"),
        ("vocab.json", "LlamaTokenizer"),
        ("own.tiktoken", "QWenTokenizer"),
        ("tekken.json", None),
        ("vocab.txt", None),
    ],
)
def test_tokenizer_files_that_cannot_be_read_are_refused_by_name(
    file: str, class_name: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    (tmp_path / file).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    with pytest.raises(UnsupportedModel, match=re.escape(file)) as refused:
        Text.load(tmp_path)
    assert "\n" not in refused.value.message


def test_code_that_comes_with_a_model_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_sentencepiece_model(tmp_path)
    classes = {"AutoTokenizer": ["code.Own", None]}
    config = {"tokenizer_class": "Own", "auto_map": classes}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('the code has run')")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    for load in (Text.load, tokenizer_files.tokenizer_text):
        with pytest.raises(UnsupportedModel, match="is never run") as refused:
            load(tmp_path)
        assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "tokenizer_config.json"]
)
def test_a_pointer_of_git_lfs_is_called_so(file: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InvalidCheckpoint, match=f"{re.escape(file)} .*git lfs pull"):
        Text.load(tmp_path)

"""What a model folder's files say about text, and the ways a folder can be written."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from baton.core import model_store
from baton.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest, UnsupportedModel
from baton.core.types import ChatPrompt, Message, Tool
from baton.router.answers.tool_formats import MISTRAL
from baton.router.prompts.text import Text


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_store.locate("embedded")


KEPT = 4096
"""How many of the embedded model's tokens variants of it have: to read all takes 0.2 s."""


@pytest.fixture(scope="module")
def fewer_tokens(folder: Path) -> dict[str, Any]:
    """The embedded model's tokenizer with the first of its tokens."""
    made: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    model = made["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < KEPT}
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    return made


Variant = Callable[..., Text]


@pytest.fixture
def variant(folder: Path, fewer_tokens: dict[str, Any], tmp_path: Path) -> Variant:
    """Loads the embedded model's folder, with fewer tokens and some of its JSON files changed."""

    def load(**files: object) -> Text:
        (tmp_path / "tokenizer.json").write_text(json.dumps(fewer_tokens))
        for name in ("config", "generation_config", "tokenizer_config"):
            shutil.copy(folder / f"{name}.json", tmp_path)
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return Text.load(tmp_path)

    return load


CHAT = ChatPrompt((Message("user", "Hi"),))


def test_a_folder_without_a_template_takes_no_chat(variant: Variant) -> None:
    text = variant(tokenizer_config={})
    assert not text.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        text.encode(CHAT)


SEEN = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMED = {
    "default": f"plain {SEEN}",
    "tool_use": f"{{{{ tools[0].function.name }}}} [TOOL_CALLS]{SEEN}",
    "rag": f"documents {SEEN}",
}
LISTED = [{"name": name, "template": source} for name, source in NAMED.items()]
TEMPLATES: dict[str, tuple[dict[str, object], dict[str, str]]] = {
    "a list": ({"chat_template": LISTED}, {}),
    "an object": ({"chat_template": NAMED}, {}),
    "files": (
        {"chat_template": "not used"},
        {
            "chat_template.jinja": NAMED["default"],
            "additional_chat_templates/tool_use.jinja": NAMED["tool_use"],
        },
    ),
    "a default beside another": ({"chat_template": LISTED[::2]}, {}),
    "one default": ({"chat_template": LISTED[:1]}, {}),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_named_templates_a_chat_has_the_one_of_transformers(
    name: str, variant: Variant, tmp_path: Path
) -> None:
    config, files = TEMPLATES[name]
    for file, source in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source)
    text = variant(tokenizer_config=config)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    schema = {"name": "look", "description": "", "parameters": {"type": "object"}}
    for tools in ([], [{"type": "function", "function": schema}]):
        wanted = oracle.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tools=tools or None, tokenize=False
        )
        given = tuple(Tool("look", "", '{"type": "object"}') for _ in tools)
        assert text.render(dataclasses.replace(CHAT, tools=given)) == wanted


def test_the_tool_format_is_read_from_the_template_of_chats_with_tools(variant: Variant) -> None:
    named = {**NAMED, "default": f"<think></think>{SEEN}"}
    answers = variant(tokenizer_config={"chat_template": named}).answers
    assert (answers.tools, answers.reasoning) == (MISTRAL, True)


def test_a_template_that_is_the_only_one_may_have_any_name(variant: Variant) -> None:
    only = variant(tokenizer_config={"chat_template": {"chat": f"only {SEEN}"}})
    assert only.has_chat_template
    assert only.render(CHAT) == "only Hi"


def test_a_chat_without_tools_needs_a_default_template(variant: Variant) -> None:
    named = {name: NAMED[name] for name in ("tool_use", "rag")}
    text = variant(tokenizer_config={"chat_template": named})
    assert not text.has_chat_template
    with pytest.raises(InvalidRequest, match="without tools; its templates are rag, tool_use"):
        text.render(CHAT)


def test_a_template_may_be_a_json_file_of_its_own(variant: Variant) -> None:
    text = variant(tokenizer_config={}, chat_template={"chat_template": "own"})
    assert text.render(CHAT) == "own"


def test_a_template_file_goes_before_the_tokenizers_template(
    variant: Variant, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} é", encoding="utf-8")
    assert variant().render(CHAT) == "Hi é"


def test_special_tokens_may_be_text_or_objects(variant: Variant) -> None:
    config = {
        "bos_token": {"content": "<|im_start|>", "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    }
    assert variant(tokenizer_config=config).render(CHAT) == "<|im_start|><|im_end|>"


NEW = {"content": "<|new|>", "special": True, "lstrip": True}
BESIDE: dict[str, dict[str, object]] = {
    "a token with an id": {"tokenizer_config": {"added_tokens_decoder": {str(KEPT): NEW}}},
    "several": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                str(KEPT + 1): NEW,
                str(KEPT): {**NEW, "content": "<|first|>"},
            },
            "pad_token": "<|pad|>",
        }
    },
    "special tokens": {"tokenizer_config": {"additional_special_tokens": ["<|new|>", "Hi"]}},
    "their newer name": {"tokenizer_config": {"extra_special_tokens": ["<|new|>"]}},
    "a named token": {"tokenizer_config": {"bos_token": "<|new|>", "unk_token": "<|pad|>"}},
    "older files": {
        "tokenizer_config": {},
        "special_tokens_map": {"eos_token": {**NEW, "lstrip": False}, "bos_token": "<|first|>"},
        "added_tokens": {"Hi": KEPT + 1, "<|new|>": KEPT},
    },
    "no special tokens in text": {"tokenizer_config": {"split_special_tokens": True}},
}


@pytest.mark.parametrize("name", BESIDE)
def test_tokens_of_files_beside_the_tokenizer_are_transformers(
    name: str, variant: Variant, tmp_path: Path
) -> None:
    text = variant(**BESIDE[name])
    oracle = AutoTokenizer.from_pretrained(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    for prompt in ("Hi <|new|> there<|im_end|>", "<|first|>Hi<|pad|>\n Hi"):
        assert text.encode(prompt) == oracle(prompt)["input_ids"]


def test_an_older_file_names_special_tokens(variant: Variant) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}"}
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    text = variant(tokenizer_config=config, special_tokens_map=special, generation_config={})
    assert text.render(CHAT) == "<|im_start|><|im_end|>"
    assert 2 in text.eos_token_ids


@pytest.mark.parametrize(
    ("generation", "model", "wanted"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 5}, {7}),
        ({"eos_token_id": [7, 8]}, {}, {7, 8}),
        ({}, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {5}),
        ({}, {"text_config": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({}, {"eos_token_id": None}, set()),
        ({"eos_token_id": -1}, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": [-1, 7]}, {}, {7}),
        ({}, {"eos_token_id": -1}, set()),
    ],
)
def test_eos_comes_from_the_generation_config_or_else_the_config(
    variant: Variant, generation: object, model: dict[str, object], wanted: set[int]
) -> None:
    config = {"vocab_size": 9, **model}
    text = variant(generation_config=generation, config=config, tokenizer_config={})
    assert text.eos_token_ids == wanted


@pytest.mark.parametrize("wrong", ["2", [[2]], {"a": 2}, 2.5, True, -2, [2, None]])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_an_eos_that_is_no_token_is_refused_by_key(
    file: str, wrong: object, variant: Variant
) -> None:
    right = {"vocab_size": 9, "eos_token_id": 2}
    files = {"generation_config": right, "config": right, file: {**right, "eos_token_id": wrong}}
    with pytest.raises(InvalidConfig, match=f"{file}.json: eos_token_id must be a token id or"):
        variant(**files)


def test_the_tokenizers_own_eos_always_ends_an_answer(variant: Variant) -> None:
    text = variant(
        generation_config={"eos_token_id": 0}, tokenizer_config={"eos_token": "<|im_end|>"}
    )
    assert text.eos_token_ids == {0, 2}


def test_the_model_may_take_more_ids_than_the_tokenizer_has(variant: Variant) -> None:
    assert variant(config={"vocab_size": 50_000}).vocabulary_size == 50_000


def test_a_config_that_does_not_say_the_vocabularys_size_is_refused(variant: Variant) -> None:
    with pytest.raises(UnsupportedModel, match="vocab_size"):
        variant(config={})


def test_a_tokenizer_file_that_cuts_and_pads_does_not_cut_or_pad_prompts(
    variant: Variant, fewer_tokens: dict[str, Any]
) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert (
        len(
            variant(tokenizer={**fewer_tokens, "truncation": truncation}).encode(
                "one two three four"
            )
        )
        == 4
    )


def test_a_broken_file_is_named(variant: Variant, tmp_path: Path) -> None:
    variant()
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text("{")
        with pytest.raises(InvalidConfig, match=name.replace(".", r"\.")):
            Text.load(tmp_path)


CLASSES = ["GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizer", "GPTNeoXTokenizer", "NoSuch"]


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("class_name", CLASSES)
def test_a_space_before_text_is_added_as_by_the_class_in_transformers(
    class_name: str, prefixed: bool, variant: Variant, tmp_path: Path
) -> None:
    config = {"add_prefix_space": prefixed, "tokenizer_class": class_name}
    text = variant(tokenizer_config=config)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    for prompt in ("Hello world", " Hello", "<|im_start|>user\nhi\tthere<|im_end|>", "é 123"):
        assert text.encode(prompt) == oracle(prompt)["input_ids"]


def test_a_tokenizer_file_decides_where_the_class_is_code_of_the_model(variant: Variant) -> None:
    own = {"auto_map": {"AutoTokenizer": ["code.Own", None]}, "tokenizer_class": "Own"}
    text = variant(tokenizer_config={**own, "add_prefix_space": True})
    assert text.encode("Hello") == variant(tokenizer_config={}).encode("Hello")


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer.json"])
def test_text_that_is_not_utf_8_is_refused_by_the_name_of_its_file(
    file: str, variant: Variant, tmp_path: Path
) -> None:
    variant()
    (tmp_path / file).write_bytes("été".encode("latin-1"))
    with pytest.raises(InvalidCheckpoint, match=f"{re.escape(file)} is not UTF-8"):
        Text.load(tmp_path)

"""What a model's folder says about text: tokenizer, special tokens, template, sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from baton.core import model_store
from baton.core.errors import InvalidConfig, UnsupportedModel

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

Json = dict[str, object]


class TextFiles:
    """The folder's JSON files, each read once. A file that is not there reads as empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer_config = _read_json(folder / "tokenizer_config.json")
        self._generation_config = _read_json(folder / "generation_config.json")
        config = _read_json(folder / "config.json")
        # A model for more than text keeps the language model's part apart.
        inner = config.get("text_config")
        self._config = {**config, **inner} if isinstance(inner, dict) else config

    def tokenizer(self) -> Tokenizer | None:
        """As in tokenizer.json, but never cutting or padding a prompt. None when there is none."""
        if (self._folder / "tokenizer.json").is_file():
            made = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        elif (self._folder / model_store.SENTENCEPIECE_FILE).is_file():
            made = Tokenizer.from_str(model_store.convert_sentencepiece(self._folder))
        else:
            return None
        made.no_truncation()
        made.no_padding()
        return made

    def special_tokens(self) -> dict[str, str]:
        """The text of bos_token, eos_token and so on, of those that are set."""
        written = {name: self._tokenizer_config.get(name) for name in SPECIAL_TOKEN_NAMES}
        return {name: text for name, token in written.items() if (text := _token_text(token))}

    def chat_template(self) -> str | None:
        alone = self._folder / "chat_template.jinja"
        if alone.is_file():
            return alone.read_text(encoding="utf-8")
        legacy = _read_json(self._folder / "chat_template.json")
        template = self._tokenizer_config.get("chat_template") or legacy.get("chat_template")
        return _default_template(template)

    def eos_token_ids(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        """What ends an answer: as the generation config says, or else the model's config;
        and always the tokenizer's own end token, which is how chat models close a turn."""
        written = self._generation_config.get("eos_token_id", self._config.get("eos_token_id"))
        ids = set(written if isinstance(written, list) else [written])
        if tokenizer is not None:
            ids.add(tokenizer.token_to_id(self.special_tokens().get("eos_token", "")))
        return frozenset(ids - {None})

    def vocabulary_size(self) -> int:
        """How many token ids the model takes; the tokenizer may use fewer."""
        size = self._config.get("vocab_size")
        if not isinstance(size, int):
            raise UnsupportedModel(f"{self._folder}/config.json does not say vocab_size")
        return size


def _read_json(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidConfig(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} does not hold a JSON object")
    return content


def _token_text(token: object) -> str:
    """A special token is written as its text or as an object that holds it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _default_template(template: object) -> str | None:
    """A template is written as its text or as a list of named ones."""
    if isinstance(template, list):
        return dict(_named_templates(template)).get("default")
    return template if isinstance(template, str) else None


def _named_templates(templates: list[object]) -> Iterator[tuple[str, str]]:
    for entry in templates:
        match entry:
            case {"name": str(name), "template": str(source)}:
                yield name, source

"""What a model folder's files say about text: tokenizer, chat templates and end tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.core import model_store
from baton.core.errors import InvalidCheckpoint, NotServed, UnsupportedModel
from baton.core.generation_defaults import end_tokens
from baton.core.tokenizer_files import TOKENIZER_FILE, convert, tokenizer_text

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class TextFiles:
    """Reads what a model folder's files say about text. A missing file counts as empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer_config = model_store.read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in self._tokenizer_config:
            # Older versions of transformers wrote special tokens to another file.
            self._tokenizer_config |= model_store.read_json(folder / "special_tokens_map.json")
        self._generation_config = model_store.read_json(folder / "generation_config.json")
        config = model_store.read_json(folder / "config.json")
        # A multimodal model has its language model's keys in text_config.
        inner = config.get("text_config")
        self._config = {**config, **inner} if isinstance(inner, dict) else config

    def tokenizer(self) -> Tokenizer | None:
        """Returns the folder's tokenizer with the tokens that other files add, and without
        truncation and padding."""
        try:
            made = _parsed(tokenizer_text(self._folder), self._folder)
        except NotServed:
            return None
        wanted = self._tokenizer_config.get("add_prefix_space")
        if isinstance(wanted, bool) and wanted != _adds_space(made):
            made = self._of_its_class() or made
        made.no_truncation()
        made.no_padding()
        made.add_tokens(self._added_tokens())  # keeps known tokens as they are
        made.encode_special_tokens = self._tokenizer_config.get("split_special_tokens") is True
        return made

    def _of_its_class(self) -> Tokenizer | None:
        """Returns the tokenizer as its class makes it: what add_prefix_space does depends on the
        class. None if transformers has no such class, which leaves what tokenizer.json says."""
        try:
            return _parsed(convert(self._folder), self._folder)
        except UnsupportedModel:
            return None

    def _added_tokens(self) -> list[AddedToken]:
        """Returns tokens of files other than tokenizer.json, in the order of the ids that
        transformers gives them."""
        config = self._tokenizer_config
        special = [config.get(f"{each}_token") for each in SPECIAL_TOKENS]
        for name in ("additional_special_tokens", "extra_special_tokens"):
            listed = config.get(name)
            special += listed if isinstance(listed, list) else []
        texts = {_token_text(each) for each in special}
        decoder = config.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            numbered = [decoder[number] for number in sorted(decoder, key=_padded)]
        else:
            added = model_store.read_json(self._folder / "added_tokens.json")
            numbered = sorted(added, key=lambda text: _padded(added[text]))
        tokens = [_added_token(each, special=_token_text(each) in texts) for each in numbered]
        tokens += [_added_token(each, special=True) for each in special]
        return [token for token in tokens if token.content]

    def special_tokens(self) -> dict[str, str]:
        """Returns the texts of bos_token, eos_token and so on, as far as they are set."""
        names = [f"{each}_token" for each in SPECIAL_TOKENS]
        written = {name: self._tokenizer_config.get(name) for name in names}
        return {name: text for name, token in written.items() if (text := _token_text(token))}

    def chat_templates(self) -> dict[str, str]:
        """Returns the chat templates by name; one without a name is the default. As in
        transformers, files of templates alone go before the tokenizer's."""
        alone = {"default": self._folder / "chat_template.jinja"}
        more = sorted(self._folder.glob("additional_chat_templates/*.jinja"))
        files = alone | {file.stem: file for file in more}
        if found := {
            name: model_store.read_text(file) for name, file in files.items() if file.is_file()
        }:
            return found
        legacy = model_store.read_json(self._folder / "chat_template.json")
        written = self._tokenizer_config.get("chat_template") or legacy.get("chat_template")
        return dict(_named_templates(written))

    def eos_token_ids(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        """Returns the end tokens of the generation config, or else of the model config, plus the
        tokenizer's own, with which chat models close a turn."""
        stated = end_tokens("generation_config.json", self._generation_config)
        of_model = end_tokens("config.json", self._config)
        ids = stated or of_model
        own = tokenizer and tokenizer.token_to_id(self.special_tokens().get("eos_token", ""))
        return frozenset(ids if own is None else [*ids, own])

    def vocabulary_size(self) -> int:
        """Returns the model's number of token ids; the tokenizer may use fewer."""
        size = self._config.get("vocab_size")
        if not isinstance(size, int):
            raise UnsupportedModel(f"{self._folder}/config.json does not say vocab_size")
        return size


def _parsed(text: str, folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise InvalidCheckpoint(f"{folder / TOKENIZER_FILE} is not a tokenizer: {error}") from error


def _adds_space(tokenizer: Tokenizer) -> bool:
    """True if the tokenizer puts a space before text or words."""
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    for step in _steps([json.loads(part.__getstate__()) for part in parts]):
        match step:
            case {"type": "Prepend"} | {"add_prefix_space": True}:
                return True
            case {"prepend_scheme": "first" | "always"}:
                return True
    return False


def _steps(states: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the states of parts of a tokenizer, and those of the parts of sequences."""
    for state in states:
        yield state
        yield from _steps(state.get("normalizers") or state.get("pretokenizers") or [])


def _token_text(token: object) -> str:
    """Returns the text of a special token, which is written as text or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _added_token(token: object, *, special: bool) -> AddedToken:
    written = token if isinstance(token, dict) else {}
    flags = {name: bool(written[name]) for name in _TOKEN_FLAGS if name in written}
    special = special or bool(written.get("special"))
    return AddedToken(_token_text(token), special=special, **flags)


def _padded(number: object) -> str:
    """Returns a key that sorts numbers, and tolerates anything else in a file."""
    return str(number).zfill(9)


def _named_templates(written: object) -> Iterator[tuple[str, str]]:
    match written:
        case str(source):
            yield "default", source
        case {"name": str(name), "template": str(source)}:
            yield name, source
        case list(entries):
            for entry in entries:
                yield from _named_templates(entry)
        case dict(named):
            yield from ((name, each) for name, each in named.items() if isinstance(each, str))

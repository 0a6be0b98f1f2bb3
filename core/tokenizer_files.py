"""The tokenizer of a model's folder, in the format of tokenizer.json.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import NotServed, UnsupportedModel
from baton.core.model_store import check_pulled, read_text

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Tokenizers of other formats, which transformers converts if the model's class reads them."""

VOCABULARY_PATTERN = "*.tiktoken"

_REASONS = {
    "trust_remote_code": "its class is code that comes with the model, which is never run",
    "instantiate the backend tokenizer": "transformers has no class that reads it",
}
"""Our words for errors of transformers that have several lines."""


def tokenizer_text(folder: Path) -> str:
    """The folder's tokenizer, in the format of tokenizer.json. Raises NotServed without one, and
    UnsupportedModel for one that cannot be read."""
    if (folder / TOKENIZER_FILE).is_file():
        return read_text(folder / TOKENIZER_FILE)
    if _vocabularies(folder):
        return convert(folder)
    raise NotServed("this model has no tokenizer")


def convert(folder: Path) -> str:
    """The folder's tokenizer as its class in transformers makes it, in the format of
    tokenizer.json. Code that comes with the model is never run."""
    from transformers import AutoTokenizer

    alone = (folder / TOKENIZER_FILE).is_file()
    files = [folder / TOKENIZER_FILE] if alone else _vocabularies(folder)
    for file in files:
        check_pulled(file)
    try:
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # A class that finds none of its files makes a tokenizer of a few tokens.
        if not alone and getattr(made, "vocab_file", None) is None:
            raise ValueError(f"its class {type(made).__name__} does not read it")
        text: str = made.backend_tokenizer.to_str()
    except Exception as error:  # what a tokenizer's class may raise is not known
        names = ", ".join(file.name for file in files)
        raise UnsupportedModel(
            f"cannot convert {names} of {folder}: {_reason(error)}; add a {TOKENIZER_FILE}"
        ) from error
    return text


def _vocabularies(folder: Path) -> list[Path]:
    named = [file for name in VOCABULARY_FILES if (file := folder / name).is_file()]
    return [*named, *sorted(folder.glob(VOCABULARY_PATTERN))]


def _reason(error: Exception) -> str:
    message = str(error).strip()
    known = (words for part, words in _REASONS.items() if part in message)
    return next(known, message.partition("\n")[0] or type(error).__name__)

"""Tokenizers that a model's folder holds only as SentencePiece writes them."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import UnsupportedModel

FILE = "tokenizer.model"


def converted(folder: Path) -> str:
    """The same tokenizer as a tokenizer.json would hold it."""
    # Imported here: it brings torch, which most of those who import this do without.
    from transformers import AutoTokenizer

    try:
        text: str = AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()
    except (ImportError, OSError, ValueError) as error:
        raise UnsupportedModel(f"{folder}/{FILE} cannot be converted: {error}") from error
    return text

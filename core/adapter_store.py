"""Finds LoRA adapters, and identifies them by their content.

    /a/folder       a folder of PEFT, on all nodes
    org/name, …@rev a repository of a hub: a folder of the hub's own cache, which is downloaded

On a node that lacks a folder, a worker fetches its files from another worker into the user's cache,
by digest.

The digest of an adapter covers the weights and the keys that change their meaning, and nothing
else: names, folders and training histories do not matter, and a rewritten folder has a new digest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from string import hexdigits
from typing import Any

from baton.core import model_store
from baton.core.adapter_config import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from baton.core.config import Config
from baton.core.errors import AdapterMissing, InvalidAdapter, ModelNotFound
from baton.core.lfs_pointer import POINTER, is_lfs_pointer
from baton.core.model_store import HubName, hub_name
from baton.core.types import Adapter

HUB = "hub:"
"""Prefix of allowed hub repositories: "hub:org/*"."""

KEPT_COPIES = 256
"""Maximum copies of fetched adapters on a node."""

_DIGEST_BYTES = 16
_BLOCK_BYTES = 1 << 20


def resolve_adapter(location: str) -> str:
    """Returns a location that means the same to every process: an absolute path, or the commit of a
    hub's revision."""
    name = hub_name(location)
    if name is None:
        return str(Path(location).expanduser().absolute())
    if name.file:
        raise InvalidAdapter(f"{location}: an adapter is a repository, not a file of one")
    from baton.core import hub

    with _adapter_errors():
        return str(HubName(name.id, hub.resolve(name.id, name.revision)))


def resolve_locations(config: Config) -> dict[str, Any]:
    """The keys of a model that name models and adapters, resolved to locations that mean the same
    to every process."""
    return {
        "model": model_store.resolve(config.model),
        "draft_model": config.draft_model and model_store.resolve(config.draft_model),
        "adapters": {name: resolve_adapter(location) for name, location in config.adapters.items()},
    }


def locate_adapter(location: str) -> Path:
    """The folder of a resolved location on this machine, downloaded if missing."""
    name = hub_name(location)
    if name is None:
        return Path(location)
    from baton.core import hub

    files = (CONFIG_FILE, WEIGHTS_FILE)
    with _adapter_errors():
        folder = hub.download_files(name.id, name.revision, files)
    for file in files:
        if not (folder / file).is_file():
            raise AdapterMissing(f"{name.id} holds no adapter: it has no {file}")
    return folder


def locate_files(adapter: Adapter) -> Path:
    """The folder with an adapter's files on this machine: a fetched copy, or its own location."""
    copied = copy_folder(adapter.digest)
    if not copied.is_dir():
        return locate_adapter(adapter.folder)
    with suppress(OSError):
        copied.touch()  # it was used
    return copied


def copy_folder(digest: bytes) -> Path:
    """The folder for a fetched copy of an adapter's files."""
    return model_store.cache_folder() / "adapters" / digest.hex()


def keep_copy(adapter: Adapter, files: Path) -> None:
    """Moves a folder with the adapter's files into the cache, and drops the least recently used
    copies beyond KEPT_COPIES. Raises AdapterMissing if the files are not this adapter's."""
    if digest_of(files) != adapter.digest:
        raise AdapterMissing("the files are not those of the adapter: their digest differs")
    copied = copy_folder(adapter.digest)
    try:
        files.rename(copied)
    except OSError:
        if not copied.is_dir():  # otherwise another worker of this node was first
            raise
    with suppress(OSError):  # another worker of this node does the same
        copied.touch()
        others = [each for each in copied.parent.iterdir() if _is_digest(each.name)]
        others.remove(copied)
        others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for old in others[KEPT_COPIES - 1 :]:
            shutil.rmtree(old, ignore_errors=True)


def _is_digest(name: str) -> bool:
    return len(name) == 2 * _DIGEST_BYTES and set(name) <= set(hexdigits)


def find_adapter(location: str) -> Adapter:
    """The adapter in a folder or repository, by its digest. Reads all of it."""
    location = resolve_adapter(location)
    return Adapter(digest_of(locate_adapter(location)), location)


def digest_of(folder: Path) -> bytes:
    """The digest of the adapter in a folder. Reads all of it."""
    scales = asdict(read_adapter_config(folder).scales)
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"baton-adapter")
    digest.update(json.dumps(scales, sort_keys=True).encode() + b"\n")
    try:
        with weights_of(folder).open("rb") as weights:
            while block := weights.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AdapterMissing(f"cannot read {folder / WEIGHTS_FILE}: {reason}") from error
    return digest.digest()


def weights_of(folder: Path) -> Path:
    """The file of an adapter's weights. Raises AdapterMissing for a pointer of Git LFS."""
    file = folder / WEIGHTS_FILE
    if is_lfs_pointer(file):
        raise AdapterMissing(f"{file} is {POINTER}")
    return file


def check_location(location: str, allowed: Iterable[str]) -> None:
    """Raises InvalidAdapter for a folder that is not below an allowed one, after following links,
    and for a repository that is neither allowed nor a configured adapter's."""
    if name := hub_name(location):
        if not any(_allows(each, name.id) for each in allowed):
            raise InvalidAdapter(
                f"{name.id} is not a repository that the configuration allows (adapter_folders:"
                f" {HUB}{name.id})"
            )
        return
    path = Path(location).expanduser().resolve()
    if not any(path.is_relative_to(Path(each).expanduser().resolve()) for each in allowed):
        raise InvalidAdapter(
            f"{location} is not below a folder that the configuration allows (adapter_folders)"
        )


def _allows(allowed: str, repository: str) -> bool:
    if allowed.startswith(HUB):
        return fnmatchcase(repository, allowed.removeprefix(HUB))
    return allowed.partition("@")[0] == repository


@contextmanager
def _adapter_errors() -> Iterator[None]:
    """Reports what a hub lacks as an error of the adapter, not of the configured model."""
    try:
        yield
    except ModelNotFound as error:
        raise AdapterMissing(error.message) from error

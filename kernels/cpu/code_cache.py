"""Machine code in the user's cache folder, shared by all processes.

Any number of processes may load and store at once. A file that is damaged, or that others could
have written, is ignored. If nothing can be stored, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from baton.core.model_store import cache_folder

log = logging.getLogger(__name__)

KEPT_FILES = 1000
"""Most files kept: they have 1 to 35 KB, and a model needs three."""

_DIGEST_BYTES = hashlib.sha256().digest_size


def load(key: str) -> bytes | None:
    """The code stored under `key`; None unless it is this user's and intact."""
    try:
        with (_folder() / key).open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
            os.utime(file.fileno())
    except OSError:
        return None
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if is_ours and hashlib.sha256(code).digest() == digest else None


def store(key: str, code: bytes) -> None:
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, folder / key)
    except OSError as error:
        log.info("compiled kernels are not kept for the next start: %s", error)
    else:
        _evict(folder)


def _evict(folder: Path) -> None:
    """Removes the least recently loaded files. Stops if another process removes them too."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for file in sorted(entries, key=lambda entry: entry.stat().st_mtime)[:-KEPT_FILES]:
            os.unlink(file)


def _folder() -> Path:
    try:
        return cache_folder() / "kernels"
    except RuntimeError as error:  # a user without a home
        raise FileNotFoundError(str(error)) from error

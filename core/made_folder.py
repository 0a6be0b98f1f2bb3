"""Cache folders that one process of a machine makes once, and that are then only read.

    absent ──> made in a workspace beside it ──> installed, with a manifest

Installing is a rename: a process that dies before leaves only a workspace, which the next removes.
A lock makes a second process wait for the first and then find its work done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from baton.core.errors import InvalidConfig

MANIFEST = "baton.json"
"""The file that records what a folder was made from, and how."""

Manifest = Mapping[str, str | int]


def is_made(folder: Path, manifest: Manifest) -> bool:
    """True if the folder exists with this manifest."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == manifest)


def make_folder(folder: Path, manifest: Manifest, make: Callable[[Path], None]) -> Path:
    """Returns `folder`. Unless it has this manifest, `make` fills an empty folder, which replaces
    it."""
    if is_made(folder, manifest):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent):
            # Another process may have finished while this one waited.
            if not is_made(folder, manifest):
                _make(folder, manifest, make)
    except OSError as error:
        raise InvalidConfig(f"cannot make {folder} (XDG_CACHE_HOME): {error}") from error
    return folder


@contextlib.contextmanager
def _lock(parent: Path) -> Iterator[None]:
    """Holds the lock, which the system releases when the process dies."""
    with (parent / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(folder: Path, manifest: Manifest, make: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}."
    for abandoned in folder.parent.glob(f"{prefix}*"):
        # Only the lock's holder has a workspace, so any other is a dead process's.
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as name:
        made = Path(name) / "made"
        made.mkdir()
        make(made)
        (made / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        _install(made, folder, attic=Path(name) / "replaced")


def _install(made: Path, folder: Path, *, attic: Path) -> None:
    """Moves `made` to `folder`, and what was there to `attic`."""
    for path in made.iterdir():
        # Without this, a power cut could leave empty files in a renamed folder.
        with path.open("rb") as written:
            os.fsync(written.fileno())
    if folder.exists():
        folder.rename(attic)
    made.rename(folder)

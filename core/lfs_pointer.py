"""Pointers of Git LFS, which stand in a clone for large files that are not downloaded yet."""

from __future__ import annotations

from pathlib import Path

POINTER = "a pointer of Git LFS; run `git lfs pull`"
"""The end of an error."""

_BEGIN = b"version https://git-lfs"


def is_lfs_pointer(path: Path) -> bool:
    """True if the file is a pointer of Git LFS."""
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN

"""Recognizes pointers of Git LFS: small text files that a clone without LFS has instead of weights
and other large files."""

from __future__ import annotations

from pathlib import Path

_BEGIN = b"version https://git-lfs"


def is_lfs_pointer(path: Path) -> bool:
    """True if the file is a pointer of Git LFS."""
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN

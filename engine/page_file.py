"""One page of keys and values in a file of its own.

A header, then the page's bytes. The header says everything that the bytes mean
(the form, and the page's key) and has a digest of them: a file that is damaged,
cut short, or was written by another version or for another model is not read.
A file appears under its name only when it is whole.

Version history of the format:

    1   header as `_HEADER`, then the page
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy
import numpy.typing

from baton.core.page_keys import page_digest

MAGIC = b"baton kv"
VERSION = 1
UNFINISHED = ".new"
"""How the names of files end that are being written."""

# Magic, version, root, dtype, tokens, bytes and key of the page, and its digest.
_HEADER = struct.Struct("<8sI16s16sIQ16sI")

PageBytes = numpy.typing.NDArray[numpy.uint8]


@dataclass(frozen=True, slots=True)
class PageForm:
    """What all pages of a pool have in common."""

    # Of the pages' keys: it stands for the model and for how pages are laid out.
    root: bytes
    dtype: str
    page_size: int  # tokens
    page_bytes: int

    @property
    def file_bytes(self) -> int:
        return _HEADER.size + self.page_bytes

    def header(self, key: bytes, page: PageBytes) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.root,
            self.dtype.encode(),
            self.page_size,
            self.page_bytes,
            key,
            page_digest(page),
        )


def write_page(path: Path, form: PageForm, key: bytes, page: PageBytes) -> None:
    """Writes a page [bytes], or raises OSError and leaves nothing behind."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(unfinished, "wb", opener=_open_privately) as file:
            file.write(form.header(key, page))
            file.write(page.data)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_page(path: Path, form: PageForm, key: bytes, into: PageBytes) -> bool:
    """Fills `into` [bytes]. False, and the file is gone, when it is not that page of this form."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
            whole = file.readinto(into.data) == form.page_bytes and not file.read(1)
        if whole and header == form.header(key, into):
            os.utime(path)  # the least recently used go first, after a restart too
            return True
    except OSError:
        pass
    remove_page(path)
    return False


def remove_page(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _open_privately(path: str, flags: int) -> int:
    """What prompts say is for their owner's eyes."""
    return os.open(path, flags, mode=0o600)

"""Keeps pages in files, which a restarted worker finds again.

    FOLDER/<root of the keys>/<worker>/<first byte of the key>/<key>

A writing thread lists, writes and removes files in the order of requests. The restoring
thread reads. engine/second_tier.py knows which files there are.

A file is a header, then the page. The header holds everything that gives the bytes meaning
(the form and the page's key) and their digest. A file gets its name only when it is complete.
A file that is missing, damaged, truncated, or of another model or version is a miss and is
removed. When files cannot be written, one warning is logged and writes are retried after
`RETRY_SECONDS`.

Version history of the format:

    1   magic, version, root, dtype, tokens, bytes and key of the page, and its digest; then the
        page. If pages hold a slice of the layers, keys have one more byte: the slice's number
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from baton.core.page_keys import KEY_BYTES, KEY_SIZES, page_digest
from baton.engine.page_memory import PageBytes

log = logging.getLogger(__name__)

MOST_WRITES = 64
"""Limit of pages that wait to be written; further pages are refused."""
RETRY_SECONDS = 60.0
MAGIC = b"baton kv"
VERSION = 1
UNFINISHED = ".new"
"""Suffix of files that are being written."""

Result = TypeVar("Result")
Task = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PageForm:
    """What all pages of a pool have in common."""

    root: bytes  # of the page keys: stands for the model and the layout
    dtype: str
    page_size: int  # tokens
    page_bytes: int
    key_bytes: int = KEY_BYTES

    @property
    def header_bytes(self) -> int:
        return self._header.size

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.page_bytes

    def header(self, key: bytes, page: PageBytes) -> bytes:
        form = self.root, self.dtype.encode(), self.page_size, self.page_bytes
        return self._header.pack(MAGIC, VERSION, *form, key, page_digest(page))

    @property
    def _header(self) -> struct.Struct:
        return struct.Struct(f"<8sI16s16sIQ{self.key_bytes}sI")


class PageFiles:
    """Uses at most `budget` bytes of `folder`.

    `submit` runs a task on the writing thread, `post` one on the pool's thread.
    """

    def __init__(
        self,
        folder: Path,
        budget: int,
        form: PageForm,
        submit: Callable[[Task], None],
        post: Callable[[Task], None],
    ) -> None:
        self.capacity = budget // form.file_bytes
        self.form = form
        self._folder = folder
        self._submit = submit
        self._post = post
        self.pending = 0  # lists and writes without a result yet
        self._failing_until = 0.0
        self.failing = False

    # Called by the pool's thread.

    @property
    def accepts_pages(self) -> bool:
        """True if a page can be written now."""
        if self.pending >= MOST_WRITES or not self.capacity:
            return False
        return not self.failing or time.monotonic() >= self._failing_until

    def list_folder(self, then: Callable[[list[bytes] | None], None]) -> None:
        """Calls `then` with the keys in the folder, the least recently used first."""
        self._run(self._list, then)

    def write(self, key: bytes, page: PageBytes, then: Callable[[bool | None], None]) -> None:
        """Starts to write a page, which must not change until `then` is called."""
        self._run(lambda: self._write(key, page), then)

    def remove(self, key: bytes) -> None:
        self._submit(lambda: _unlink(self._path(key)))

    def _run(self, work: Callable[[], Result], then: Callable[[Result | None], None]) -> None:
        """Runs `work` on the writing thread, then `then` with its result; None if it failed."""

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except OSError as caught:
                error = caught
            self._post(partial(end, result, error))

        def end(result: Result | None, error: OSError | None) -> None:
            self._settle(error)
            then(result)

        self.pending += 1
        self._submit(run)

    def _settle(self, error: OSError | None) -> None:
        self.pending -= 1
        if error is not None:
            self._failing_until = time.monotonic() + RETRY_SECONDS
            if not self.failing:
                log.warning("pages are not kept in files: %s", error)
        elif self.failing:
            log.info("pages are kept in files again")
        self.failing = error is not None

    # Called by the restoring thread.

    def read(self, key: bytes, into: PageBytes) -> bool:
        """Fills `into` [bytes]. Removes the file and returns False if it is not that page."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                header = file.read(self.form.header_bytes)
                whole = file.readinto(into.data) == self.form.page_bytes and not file.read(1)
            if whole and header == self.form.header(key, into):
                os.utime(path)  # keeps the order of use across a restart
                return True
        except OSError:
            pass
        _unlink(path)
        return False

    # Called by the writing thread.

    def _list(self) -> list[bytes]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [key for _, key in sorted(self._page_files())]

    def _page_files(self) -> Iterable[tuple[float, bytes]]:
        """Time of last use and key of each file. Files that cannot be pages are removed."""
        for folder in os.scandir(self._folder):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                key, state = _key_of(entry.name), entry.stat()
                if key is None or state.st_size != self.form.file_bytes:
                    _unlink(Path(entry.path))
                else:
                    yield state.st_mtime, key

    def _write(self, key: bytes, page: PageBytes) -> bool:
        path = self._path(key)
        unfinished = path.with_name(path.name + UNFINISHED)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(unfinished, "wb", opener=_open_privately) as file:
                file.write(self.form.header(key, page))
                file.write(page.data)
            os.replace(unfinished, path)
        except OSError:
            _unlink(unfinished)
            raise
        return True

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name


def _key_of(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) in KEY_SIZES and key.hex() == name else None


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _open_privately(path: str, flags: int) -> int:
    """Only the owner may read prompts."""
    return os.open(path, flags, mode=0o600)

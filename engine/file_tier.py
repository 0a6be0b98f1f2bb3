"""Pages in files, which a restarted worker finds again.

    FOLDER/<root of the keys>/<worker>/<first byte of the key>/<key>

The index, oldest first, belongs to the pool's thread. Files are written, listed
and removed by a thread of their own, in the order in which that was asked for;
what became of it comes back through `post`. Reading is for whoever restores.

A file that is in the index may be missing or damaged: it is then not found when
it is read, and that costs a miss. When files cannot be written, a warning says
so once, and it is tried again after `RETRY_SECONDS`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView
from dataclasses import dataclass
from pathlib import Path

import numpy
import numpy.typing

from baton.core.page_keys import KEY_BYTES, page_digest

log = logging.getLogger(__name__)

MOST_WRITES = 64
"""Pages that may wait to be written; others are not taken meanwhile."""
RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Written:
    """A page is in its file, or why it is not."""

    key: bytes
    row: int
    error: OSError | None


@dataclass(frozen=True, slots=True)
class Listed:
    """What the folder held at the start, the least recently used first."""

    keys: list[bytes]
    error: OSError | None


FileEvent = Written | Listed


class FileTier:
    def __init__(
        self,
        folder: Path,
        budget: int,
        form: PageForm,
        submit: Callable[[Callable[[], None]], None],
        post: Callable[[FileEvent], None],
    ) -> None:
        """Of `folder`, at most `budget` bytes are used. What is there is listed first."""
        self.capacity = budget // form.file_bytes
        self._folder = folder
        self._form = form
        self._submit = submit
        self._post = post
        self._index: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self.pending = 1  # the list, and writes that nothing was heard of yet
        self._failing_until = 0.0
        self.failing = False
        submit(self._list)

    # Called by the pool's thread.

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    @property
    def keys(self) -> KeysView[bytes]:
        return self._index.keys()

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self._index) * self._form.file_bytes

    @property
    def takes_pages(self) -> bool:
        """Whether a page can be written now."""
        if self.pending >= MOST_WRITES or not self.capacity:
            return False
        return not self.failing or time.monotonic() >= self._failing_until

    def write(self, key: bytes, row: int, page: PageBytes) -> list[bytes]:
        """Has a page written, which must not change until it is. The keys that had to go."""
        self.pending += 1
        self._index[key] = None
        self._submit(lambda: self._write(key, row, page))
        return self._shrink()

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used, the last of them most recently."""
        for key in keys:
            if key in self._index:
                self._index.move_to_end(key)

    def remove(self, key: bytes) -> None:
        if key in self._index:
            del self._index[key]
            self._submit(lambda: remove_page(self._path(key)))

    def on_written(self, event: Written) -> bool:
        """False when a page that counted as written is not."""
        self.pending -= 1
        self._note(event.error)
        if event.error is None or event.key not in self._index:
            return True
        del self._index[event.key]
        return False

    def on_listed(self, event: Listed) -> list[bytes]:
        """The keys that had to go."""
        self.pending -= 1
        self._note(event.error)
        listed = OrderedDict.fromkeys(event.keys)
        listed.update(self._index)
        self._index = listed
        return self._shrink()

    def _shrink(self) -> list[bytes]:
        gone = []
        while len(self._index) > self.capacity:
            gone.append(next(iter(self._index)))
            self.remove(gone[-1])
        return gone

    def _note(self, error: OSError | None) -> None:
        if error is not None:
            self._failing_until = time.monotonic() + RETRY_SECONDS
            if not self.failing:
                log.warning("pages are not kept in files: %s", error)
        elif self.failing:
            log.info("pages are kept in files again")
        self.failing = error is not None

    # Called by whoever restores pages.

    def read(self, key: bytes, into: PageBytes) -> bool:
        """Fills `into` with a page. False when its file is not there, or not sound."""
        return read_page(self._path(key), self._form, key, into)

    # Called by the files' own thread.

    def _list(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = sorted(self._sound_files())
        except OSError as error:
            self._post(Listed([], error))
        else:
            self._post(Listed([key for _, key in found], None))

    def _sound_files(self) -> Iterable[tuple[float, bytes]]:
        """When each was last used, and its key. What cannot be a page of ours is removed."""
        for folder in os.scandir(self._folder):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                key, state = _key_of(entry.name), entry.stat()
                if key is None or state.st_size != self._form.file_bytes:
                    remove_page(Path(entry.path))
                else:
                    yield state.st_mtime, key

    def _write(self, key: bytes, row: int, page: PageBytes) -> None:
        try:
            write_page(self._path(key), self._form, key, page)
        except OSError as error:
            self._post(Written(key, row, error))
        else:
            self._post(Written(key, row, None))

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name


def _key_of(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and key.hex() == name else None


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

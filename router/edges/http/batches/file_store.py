"""Callers' files on disk: the content in tenant-NAME/ID.jsonl, its description in ID.json.

A file exists once its ID.json does, which is written last and atomically. Any number of routers may
share the folder: nothing about it is kept in memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from typing_extensions import TypedDict

from baton.core.config import BatchesConfig
from baton.core.errors import Exhausted, InvalidConfig
from baton.router.edges.http.answer_renderer import encode
from baton.router.edges.http.paging import unknown_id

_TENANT = "tenant-"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}(-output|-errors)?")
_ABANDONED_SECONDS = 86400.0
"""Age at which an unpublished file counts as an interrupted upload."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Purpose = Literal["batch", "batch_output"]


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"]


class FileStore:
    def __init__(self, config: BatchesConfig) -> None:
        self._folder = Path(config.folder)
        self._budget = config.budget
        self.keep_seconds = config.keep_seconds
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"cannot use batches.folder: {error}") from error
        self.lock_path = self._folder / "lock"

    @property
    def owners(self) -> list[str]:
        return sorted(path.name.removeprefix(_TENANT) for path in self._tenants())

    def _tenants(self) -> Iterator[Path]:
        return self._folder.glob(f"{_TENANT}*")

    def folder(self, owner: str) -> Path:
        return self._folder / f"{_TENANT}{owner}"

    def path(self, owner: str, identity: str, suffix: str) -> Path:
        """Path of a caller's file, which need not exist. Raises UnknownRequest for a malformed
        id."""
        if not _ID.fullmatch(identity):
            raise unknown_id(identity)
        return self.folder(owner) / f"{identity}{suffix}"

    def content(self, owner: str, file_id: str) -> Path:
        return self.path(owner, file_id, ".jsonl")

    def upload(self, owner: str, content: BinaryIO, filename: str, keep: float) -> FileObject:
        """Copies the rest of `content`. Raises Exhausted if it does not fit."""
        start = content.tell()
        self.check_budget(content.seek(0, os.SEEK_END) - start)
        content.seek(start)
        file_id = f"file-{uuid.uuid4().hex}"
        path = self.content(owner, file_id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with path.open("wb") as copy:
                shutil.copyfileobj(content, copy, 2**20)
                copy.flush()
                os.fsync(copy.fileno())
            return self.publish(owner, file_id, filename, "batch", keep)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise_if_full(error)
            raise

    def publish(
        self, owner: str, file_id: str, filename: str, purpose: Purpose, keep: float
    ) -> FileObject:
        """Makes a complete file visible to its owner."""
        now = int(time.time())
        file: FileObject = {
            "id": file_id,
            "object": "file",
            "bytes": self.content(owner, file_id).stat().st_size,
            "created_at": now,
            "expires_at": now + int(keep),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        write_json(self.path(owner, file_id, ".json"), file)
        return file

    def files(self, owner: str) -> list[FileObject]:
        """Newest first."""
        found: Iterable[FileObject] = read_all(self.folder(owner), "file-*.json")
        return sorted(found, key=lambda file: (file["created_at"], file["id"]), reverse=True)

    def file(self, owner: str, file_id: str) -> FileObject:
        try:
            found: FileObject = json.loads(self.path(owner, file_id, ".json").read_bytes())
        except FileNotFoundError:
            raise unknown_id(file_id) from None
        return found

    def delete(self, owner: str, file_id: str) -> None:
        self.file(owner, file_id)
        # In this order, so that an interrupted deletion can be repeated.
        self.content(owner, file_id).unlink(missing_ok=True)
        self.path(owner, file_id, ".json").unlink(missing_ok=True)

    def check_budget(self, more: int = 0) -> None:
        used = sum(_size(path) for folder in self._tenants() for path in folder.iterdir())
        if used + more > self._budget:
            raise Exhausted(
                f"the files here have {used} of {self._budget} bytes; delete some first"
            )

    def sweep(self) -> None:
        """Deletes expired files and interrupted uploads."""
        now = time.time()
        for owner in self.owners:
            for file in self.files(owner):
                if file["expires_at"] <= now:
                    self.delete(owner, file["id"])
            for path in self.folder(owner).glob("file-*.jsonl"):
                uploaded = not path.stem.endswith(("-output", "-errors"))
                abandoned = now - path.stat().st_mtime > _ABANDONED_SECONDS
                if uploaded and abandoned and not path.with_suffix(".json").exists():
                    path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted meanwhile
        return 0


def raise_if_full(error: OSError) -> None:
    if error.errno in _FULL:
        raise Exhausted("the server's disk is full; delete files, or try later") from error


def write_json(path: Path, value: object, *, durable: bool = True) -> None:
    """Replaces a file atomically; unless `durable`, a power cut may undo it."""
    fresh = path.with_suffix(".part")
    try:
        with fresh.open("wb") as file:
            file.write(encode(value))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_all(folder: Path, pattern: str) -> Iterator[Any]:
    for path in folder.glob(pattern):
        try:
            yield json.loads(path.read_bytes())
        except FileNotFoundError:  # deleted meanwhile
            continue

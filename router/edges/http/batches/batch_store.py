"""Batches on disk: tenant-NAME/ID.json is a batch as its owner sees it.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │               └─ cancelling, or out of time ─▶ cancelled, expired
        └─▶ failed

Only the router that runs batches writes an existing ID.json. Creating ID.cancel beside it cancels
the batch.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from baton.core.config import BatchesConfig
from baton.core.errors import InvalidRequest
from baton.router.edges.http.answer_types import CachedTokens
from baton.router.edges.http.batches.file_store import (
    FileStore,
    raise_if_full,
    read_all,
    write_json,
)
from baton.router.edges.http.generation_request import ShortText
from baton.router.edges.http.paging import unknown_id
from baton.router.edges.http.request_model import RequestModel, StrictModel, about, seconds_of

LEAST_EXPIRY = 3600
MAX_EXPIRY = 30 * 86400

# fmt: off
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing",
    "completed", "expired", "cancelling", "cancelled",
]
# fmt: on
ENDED = ("failed", "completed", "expired", "cancelled")
_CANCELLABLE = ("validating", "in_progress")


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


def _check_window(value: str) -> str:
    seconds_of(value)
    return value


class ExpiresAfter(StrictModel):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_EXPIRY, le=MAX_EXPIRY)


class BatchRequest(RequestModel):
    input_file_id: ShortText = about("A file that was uploaded for batches.", ...)
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
    ] = about("The url of all its lines.", ...)
    completion_window: Annotated[str, AfterValidator(_check_window)] = about(
        'How long it may take: a number and s, m, h or d, such as "24h".', ...
    )
    metadata: Metadata | None = about("Kept with the batch.")
    output_expires_after: ExpiresAfter | None = about(
        "When its result files are deleted, counted from their creation."
    )


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchErrorObject(TypedDict):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrorList(TypedDict):
    object: Literal["list"]
    data: list[BatchErrorObject]


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class BatchUsage(TypedDict):
    """Sums over all answers."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class OutputExpiry(TypedDict):
    anchor: Literal["created_at"]
    seconds: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrorList | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage | None
    output_expires_after: OutputExpiry | None
    metadata: dict[str, str] | None


class BatchStore:
    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._ended: set[str] = set()

    def create(self, owner: str, body: BatchRequest) -> BatchObject:
        self.files.file(owner, body.input_file_id)
        now, expiry = int(time.time()), body.output_expires_after
        batch: BatchObject = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + seconds_of(body.completion_window),
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "usage": None,
            "output_expires_after": (
                {"anchor": expiry.anchor, "seconds": expiry.seconds} if expiry else None
            ),
            "metadata": body.metadata or None,
        }
        try:
            self.save(owner, batch)
        except OSError as error:
            raise_if_full(error)
            raise
        return batch

    def save(self, owner: str, batch: BatchObject, *, durable: bool = True) -> None:
        write_json(self.files.path(owner, batch["id"], ".json"), batch, durable=durable)

    def batches(self, owner: str) -> list[BatchObject]:
        """Newest first."""
        kept = read_all(self.files.folder(owner), "batch_*.json")
        found = (self._with_cancellation(owner, batch) for batch in kept)
        return sorted(found, key=lambda batch: (batch["created_at"], batch["id"]), reverse=True)

    def batch(self, owner: str, batch_id: str) -> BatchObject:
        try:
            content = self.files.path(owner, batch_id, ".json").read_bytes()
        except FileNotFoundError:
            raise unknown_id(batch_id) from None
        return self._with_cancellation(owner, json.loads(content))

    def _with_cancellation(self, owner: str, batch: BatchObject) -> BatchObject:
        """Marks a batch as cancelling if its runner has not recorded the cancellation yet."""
        if batch["status"] in _CANCELLABLE and (at := self.cancelled_at(owner, batch["id"])):
            batch["status"], batch["cancelling_at"] = "cancelling", at
        return batch

    def cancelled_at(self, owner: str, batch_id: str) -> int:
        """When the owner cancelled the batch; 0 if never."""
        try:
            return int(self.files.path(owner, batch_id, ".cancel").stat().st_mtime)
        except FileNotFoundError:
            return 0

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        if (status := self.batch(owner, batch_id)["status"]) in (*ENDED, "finalizing"):
            raise InvalidRequest(f"this batch is {status} and cannot be cancelled", field="id")
        self.files.path(owner, batch_id, ".cancel").touch()
        return self.batch(owner, batch_id)

    def unfinished(self, owner: str) -> BatchObject | None:
        """The oldest batch that has not ended. Called often, so an ended batch is read once."""
        found = []
        for path in self.files.folder(owner).glob("batch_*.json"):
            if path.stem not in self._ended:
                batch = self.batch(owner, path.stem)
                if batch["status"] in ENDED:
                    self._ended.add(path.stem)
                else:
                    found.append(batch)
        return min(found, key=lambda batch: batch["created_at"], default=None)

    def end(
        self, owner: str, batch: BatchObject, status: BatchStatus, changes: Mapping[str, object]
    ) -> None:
        """Records how a batch ended, and forgets that it was cancelled."""
        stamp: Any = {f"{status}_at": int(time.time()), "status": status, **changes}
        batch.update(stamp)
        self.save(owner, batch)
        self.files.path(owner, batch["id"], ".cancel").unlink(missing_ok=True)

    def sweep(self) -> None:
        """Deletes expired files and batches."""
        self.files.sweep()
        oldest = time.time() - self.files.keep_seconds
        for owner in self.files.owners:
            for batch in self.batches(owner):
                if batch["status"] in ENDED and batch["created_at"] < oldest:
                    self.files.path(owner, batch["id"], ".json").unlink(missing_ok=True)


def open_batches(config: BatchesConfig) -> BatchStore | None:
    return BatchStore(FileStore(config)) if config.folder else None

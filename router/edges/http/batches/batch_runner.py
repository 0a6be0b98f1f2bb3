"""Runs batches: calls the endpoints with their lines, as if a client sent them one by one.

One router at a time runs the batches of a folder: the one that holds its lock. Results are appended
to a batch's files as they come. A router that takes over skips the lines with results and runs the
others; a line that was in progress runs again. Each API key has one batch in progress, the oldest,
and the keys take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from starlette.types import ASGIApp, Message, Scope

from baton.core.batch_lines import (
    TRANSIENT,
    BatchLine,
    answer_line,
    check_lines,
    count_tokens,
    failure_line,
    finished_ids,
    pending_lines,
)
from baton.core.bounds import MAX_PRIORITY
from baton.core.errors import BatonError, Unauthenticated
from baton.core.process import cancel_all
from baton.router.edges.auth import Caller, KeyRing
from baton.router.edges.http.batches.batch_store import (
    BatchErrorObject,
    BatchObject,
    BatchStatus,
    BatchStore,
    BatchUsage,
)
from baton.router.edges.http.batches.spare_capacity import Permit, SpareCapacity
from baton.router.edges.http.http_errors import error_response
from baton.router.edges.http.http_server import CONNECTION

log = logging.getLogger(__name__)

MAX_LINES = 50_000
POLL_SECONDS = 1.0
SWEEP_SECONDS = 600.0
LONGEST_PAUSE = 30.0


class BatchRunner:
    def __init__(
        self,
        store: BatchStore,
        spare: SpareCapacity,
        keys: KeyRing,
        endpoints: Mapping[str, ASGIApp],
    ) -> None:
        self._store = store
        self._spare = spare
        self._keys = keys
        self._endpoints = endpoints
        self._owners: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until cancelled. Lines in progress are then not recorded."""
        ticking = asyncio.create_task(self._spare.run())
        try:
            with self._store.files.lock_path.open("w") as lock:
                await self._start_batches(lock.fileno())
        finally:
            await cancel_all(ticking, *self._owners.values())

    async def _start_batches(self, lock: int) -> None:
        """Looks for batches and starts them while this router holds the lock."""
        held, swept = False, 0.0
        while True:
            try:
                held = held or _try_lock(lock)
                if held and time.monotonic() > swept + SWEEP_SECONDS:
                    swept = time.monotonic()
                    await asyncio.to_thread(self._store.sweep)
                for owner in self._store.files.owners if held else ():
                    if owner not in self._owners or self._owners[owner].done():
                        self._owners[owner] = asyncio.create_task(self._run_owner(owner))
            except OSError:
                log.exception("cannot look for batches")
            await asyncio.sleep(POLL_SECONDS)

    async def _run_owner(self, owner: str) -> None:
        """Runs the batches of one API key, if there are any."""
        try:
            while batch := await asyncio.to_thread(self._store.unfinished, owner):
                await self._run_batch(owner, batch)
        except Exception:
            # For example a full disk. The batch is tried again.
            log.exception("a batch of %r is interrupted", owner)
            await asyncio.sleep(LONGEST_PAUSE)

    async def _run_batch(self, owner: str, batch: BatchObject) -> None:
        try:
            path = self._store.files.content(owner, batch["input_file_id"])
            if batch["status"] == "validating":
                total, errors = await asyncio.to_thread(validate, path, batch["endpoint"])
                batch["request_counts"]["total"] = total
                if errors:
                    await self._fail(owner, batch, errors)
                    return
                batch["status"], batch["in_progress_at"] = "in_progress", int(time.time())
                await asyncio.to_thread(self._store.save, owner, batch)
            with Results(self._store, owner, batch) as results:
                status = await self._run_lines(results, path)
                await self._finish(results, path, status)
        except FileNotFoundError:
            gone = f"the input file {batch['input_file_id']} was deleted"
            await self._fail(owner, batch, [_error("file_not_found", gone)])
        except BatonError as error:
            await self._fail(owner, batch, [_error(error.reason.lower(), error.message)])

    async def _fail(self, owner: str, batch: BatchObject, errors: list[BatchErrorObject]) -> None:
        changes = {"errors": {"object": "list", "data": errors}}
        await asyncio.to_thread(self._store.end, owner, batch, "failed", changes)

    async def _run_lines(self, results: Results, path: Path) -> BatchStatus:
        """Runs lines until the batch ends, and returns how. Remaining lines are not run."""
        lines = asyncio.create_task(self._run_all(results, path))
        watching = asyncio.create_task(self._watch(results))
        try:
            await asyncio.wait((watching, lines), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                return watching.result()
            lines.result()
            return "completed"
        finally:
            await cancel_all(lines, watching)

    async def _watch(self, results: Results) -> BatchStatus:
        """Returns when the batch is cancelled or out of time."""
        while True:
            if self._store.cancelled_at(results.owner, results.batch["id"]):
                return "cancelled"
            if time.time() >= results.batch["expires_at"]:
                return "expired"
            await asyncio.to_thread(self._store.files.check_budget)
            self._store.save(results.owner, results.batch, durable=False)
            await asyncio.sleep(POLL_SECONDS)

    async def _run_all(self, results: Results, path: Path) -> None:
        pending = results.pending(path)
        try:
            async with asyncio.TaskGroup() as lines:
                while line := await asyncio.to_thread(next, pending, None):
                    permit = await self._spare.acquire(
                        results.owner, f"batch_req_{uuid.uuid4().hex}", line.model
                    )
                    lines.create_task(self._run_line(results, line, permit))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _run_line(self, results: Results, line: BatchLine, permit: Permit) -> None:
        """Runs a line until it is answered, again after a transient error or giving way."""
        pause, request_id = 1.0, permit.request_id
        try:
            while True:
                answer = await self._spare.call(permit, self._call(results.owner, line, request_id))
                if answer is None:
                    self._spare.release(permit)
                    permit = await self._spare.acquire(results.owner, request_id, line.model)
                elif not answer[0] or answer[0] in TRANSIENT:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                else:
                    results.add(answer[0], answer_line(line.custom_id, request_id, *answer))
                    return
        finally:
            self._spare.release(permit)

    async def _call(self, owner: str, line: BatchLine, request_id: str) -> tuple[int, bytes]:
        try:
            key = self._keys.named(owner)
        except Unauthenticated as error:  # the key was removed
            response = error_response(error, request_id)
            return response.status_code, bytes(response.body)
        # The key's limits apply to its other requests only.
        caller = Caller(replace(key, rate=0.0, concurrency=0, priority=MAX_PRIORITY))
        body = json.dumps(line.body).encode()
        return await call(self._endpoints[line.endpoint], line.endpoint, body, caller, request_id)

    async def _finish(self, results: Results, path: Path, status: BatchStatus) -> None:
        owner, batch = results.owner, results.batch
        batch["status"], batch["finalizing_at"] = "finalizing", int(time.time())
        if status == "expired":
            await asyncio.to_thread(results.expire, path)
        usage = await asyncio.to_thread(results.usage)
        output, errors = await asyncio.to_thread(results.publish)
        changes = {"output_file_id": output, "error_file_id": errors, "usage": usage}
        await asyncio.to_thread(self._store.end, owner, batch, status, changes)


class Results:
    """A batch's result files and counts. Lines that have a result already are done."""

    def __init__(self, store: BatchStore, owner: str, batch: BatchObject) -> None:
        self.owner, self.batch = owner, batch
        self._store = store
        name = batch["id"].removeprefix("batch_")
        self._ids = [f"file-{name}-{kind}" for kind in ("output", "errors")]
        self._paths = [store.files.content(owner, each) for each in self._ids]
        done, failed = map(finished_ids, self._paths)
        self._done = {*done, *failed}
        self._counts = batch["request_counts"]
        self._counts["completed"], self._counts["failed"] = len(done), len(failed)

    def __enter__(self) -> Results:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._files = [os.open(path, flags, 0o600) for path in self._paths]
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            os.close(file)

    def pending(self, path: Path) -> Iterator[BatchLine]:
        return pending_lines(path, self._done)

    def add(self, status: int, line: bytes) -> None:
        failed = status != 200
        file = self._files[failed]
        size = os.fstat(file).st_size
        # In one call: a crash leaves whole lines and at most one incomplete line.
        if os.write(file, line) < len(line):
            os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._counts["failed" if failed else "completed"] += 1

    def expire(self, path: Path) -> None:
        """Adds a result for each line that was not answered in time."""
        self._done = set().union(*map(finished_ids, self._paths))
        message = "the completion window was over before this request could run"
        for line in self.pending(path):
            request_id = f"batch_req_{uuid.uuid4().hex}"
            self.add(0, failure_line(line.custom_id, request_id, "batch_expired", message))

    def usage(self) -> BatchUsage:
        """Sums up all answers, including those before a restart."""
        counts = count_tokens(self._paths[0])
        return {
            "input_tokens": counts.input,
            "input_tokens_details": {"cached_tokens": counts.cached},
            "output_tokens": counts.output,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning},
            "total_tokens": counts.input + counts.output,
        }

    def publish(self) -> tuple[str | None, str | None]:
        """Publishes the files to the owner. Returns their ids; an empty one is removed."""
        files, keep = self._store.files, self._store.files.keep_seconds
        if expiry := self.batch.get("output_expires_after"):
            keep = min(keep, expiry["seconds"])
        found: list[str | None] = []
        for file, identity, path in zip(self._files, self._ids, self._paths, strict=True):
            os.fsync(file)
            if path.stat().st_size:
                files.publish(self.owner, identity, f"{identity}.jsonl", "batch_output", keep)
                found.append(identity)
            else:
                path.unlink()
                found.append(None)
        return found[0], found[1]


def validate(path: Path, endpoint: str) -> tuple[int, list[BatchErrorObject]]:
    """Returns the number of a file's lines and the errors in them."""
    total, wrong = check_lines(path, endpoint)
    errors = [_error("invalid_line", each.message, line, each.field) for line, each in wrong]
    if total > MAX_LINES:
        errors.append(_error("too_many_lines", f"a batch has at most {MAX_LINES} lines"))
    if not total and not errors:
        errors.append(_error("empty_file", "the input file has no lines"))
    return total, errors


def _error(
    code: str, message: str, line: int | None = None, param: str | None = None
) -> BatchErrorObject:
    return {"code": code, "line": line, "message": message, "param": param or None}


def _try_lock(lock: int) -> bool:
    """Returns True if the lock was taken. The kernel releases it when the process dies."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


async def call(
    endpoint: ASGIApp, path: str, body: bytes, caller: Caller, request_id: str
) -> tuple[int, bytes]:
    """Calls an endpoint of this process for a caller. Returns status and body; status 0 if there is
    no answer."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "user": caller,
        "state": {CONNECTION: None},
    }
    arriving: list[Message] = [{"type": "http.request", "body": body}]
    sent: list[Message] = []

    async def receive() -> Message:
        # This client never disconnects.
        return arriving.pop() if arriving else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    await endpoint(scope, receive, send)
    if not sent:
        return 0, b""
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

"""/v1/files and /v1/batches. Each API key sees only its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from typing_extensions import TypedDict

from baton.core.errors import InvalidRequest, NotServed
from baton.core.proto_json import Json
from baton.router.edges.http.batches.batch_store import (
    LEAST_EXPIRY,
    MAX_EXPIRY,
    BatchObject,
    BatchRequest,
    BatchStore,
)
from baton.router.edges.http.batches.file_store import FileObject
from baton.router.edges.http.body import body_chunks, parse_body, receive_timeout
from baton.router.edges.http.endpoint import json_response
from baton.router.edges.http.http_errors import fields_named
from baton.router.edges.http.paging import page, unknown_id

MAX_FILE_BYTES = 200 * 2**20
MAX_FILES_LISTED = 10_000
MAX_FORM_FIELDS = 8  # of an upload
MAX_BATCHES_LISTED = 100
UPLOAD_SECONDS = 3600.0
_MARGIN = 64 * 2**10  # for the rest of an upload's form


class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchEndpoints:
    """`store` is None if the router keeps no files."""

    def __init__(self, store: BatchStore | None) -> None:
        self._kept = store

    @property
    def _store(self) -> BatchStore:
        if self._kept is None:
            raise NotServed("this router keeps no files and batches: batches.folder is not set")
        return self._kept

    async def files(self, http: HttpRequest) -> Response:
        store, owner = self._store.files, http.user.key.name
        if http.method == "POST":
            return json_response(await self._upload(http))
        found = await asyncio.to_thread(store.files, owner)
        purpose = http.query_params.get("purpose")
        found = [file for file in found if purpose in (None, file["purpose"])]
        return _page(http, found, MAX_FILES_LISTED, MAX_FILES_LISTED)

    async def _upload(self, http: HttpRequest) -> Json:
        form = await _form(http)
        try:
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise InvalidRequest("file is missing", field="file")
            if purpose != "batch":
                raise InvalidRequest('purpose must be "batch"', field="purpose")
            name = PurePath(upload.filename or "").name[:255]
            store = self._store.files
            keep = _expiry(form, store.keep_seconds)
            owner = http.user.key.name
            return {**await asyncio.to_thread(store.upload, owner, upload.file, name, keep)}
        finally:
            await form.close()

    async def file(self, http: HttpRequest) -> Response:
        store, owner, file_id = self._store.files, http.user.key.name, http.path_params["file_id"]
        if http.method != "DELETE":
            return json_response({**store.file(owner, file_id)})
        await asyncio.to_thread(store.delete, owner, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, http: HttpRequest) -> Response:
        store, owner, file_id = self._store.files, http.user.key.name, http.path_params["file_id"]
        store.file(owner, file_id)
        path = store.content(owner, file_id)
        if not path.exists():
            raise unknown_id(file_id)
        return FileResponse(path, media_type="application/jsonl")

    async def batches(self, http: HttpRequest) -> Response:
        store, owner = self._store, http.user.key.name
        if http.method != "POST":
            found = await asyncio.to_thread(store.batches, owner)
            return _page(http, found, 20, MAX_BATCHES_LISTED)
        body = await parse_body(http, BatchRequest.parse)
        with fields_named(id="input_file_id"):
            batch = await asyncio.to_thread(store.create, owner, body)
        return json_response({**batch})

    async def batch(self, http: HttpRequest) -> Response:
        found = self._store.batch(http.user.key.name, http.path_params["batch_id"])
        return json_response({**found})

    async def cancel(self, http: HttpRequest) -> Response:
        found = self._store.cancel(http.user.key.name, http.path_params["batch_id"])
        return json_response({**found})


async def _form(http: HttpRequest) -> FormData:
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise HTTPException(415, "the header Content-Type must be multipart/form-data")
    chunks = body_chunks(http, MAX_FILE_BYTES, "a file", _MARGIN)
    parser = MultiPartParser(http.headers, chunks, max_files=1, max_fields=MAX_FORM_FIELDS)
    try:
        async with receive_timeout(UPLOAD_SECONDS):
            return await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the body cannot be parsed: {error.message}") from None


def _expiry(form: FormData, longest: float) -> float:
    given = form.getlist("expires_after[seconds]")
    if not given:
        return longest
    text = given[0] if len(given) == 1 else None
    seconds = int(text[:9]) if isinstance(text, str) and text.isdecimal() else 0
    if not LEAST_EXPIRY <= seconds <= MAX_EXPIRY:
        limits = f"{LEAST_EXPIRY} to {MAX_EXPIRY}"
        raise InvalidRequest(f"expires_after[seconds] must be {limits}", field="expires_after")
    return min(float(seconds), longest)


def _page(
    http: HttpRequest, found: Sequence[FileObject] | Sequence[BatchObject], default: int, most: int
) -> Response:
    by_id = {each["id"]: each for each in found}
    names, listed = page(http.query_params, [*by_id], default, most)
    return json_response({**listed, "data": [{**by_id[each]} for each in names]})

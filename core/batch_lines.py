"""Lines of a batch, as in the OpenAI API: a request each in one file, its result in another.

Results are appended as they come, so a file of results also says what is done: a run
that continues a batch finds the ids there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from baton.core.bounds import MAX_REQUEST_BYTES, MAX_VALUES, count_values
from baton.core.errors import InvalidRequest

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_CUSTOM_ID = 512
SHOWN_ERRORS = 100
TRANSIENT = (408, 429, 502, 503, 504)
"""Statuses of answers for which waiting may help."""

_OPENING = b'{"id": "'  # of every result


@dataclass(frozen=True, slots=True)
class BatchLine:
    custom_id: str
    endpoint: str
    body: dict[str, object]

    @property
    def model(self) -> str:
        """The name of its model; empty without one."""
        name = self.body.get("model")
        return name if isinstance(name, str) else ""

    @classmethod
    def parse(cls, text: bytes) -> BatchLine:
        """Raises InvalidRequest with the wrong field."""
        line = _decode(text)
        custom_id, body = line.get("custom_id"), line.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            _refuse("custom_id", f"must be a string of 1 to {MAX_CUSTOM_ID} characters")
        if line.get("method", "POST") != "POST":
            _refuse("method", "must be POST")
        if line.get("url") not in BATCH_ENDPOINTS:
            _refuse("url", f"must be one of {', '.join(BATCH_ENDPOINTS)}")
        if not isinstance(body, dict):
            _refuse("body", "must be an object")
        if body.get("stream"):
            _refuse("body.stream", "must be false: a batch has whole answers")
        return cls(custom_id, line["url"], body)


def _decode(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_REQUEST_BYTES or count_values(text) > MAX_VALUES:
        _refuse("", f"a line must have at most {MAX_REQUEST_BYTES} bytes and {MAX_VALUES} values")
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        _refuse("", "a line must be a JSON object")
    return line


def _refuse(field: str, rule: str) -> NoReturn:
    raise InvalidRequest(f"{field} {rule}".strip(), field=field)


def check_lines(path: Path, endpoint: str = "") -> tuple[int, list[tuple[int, InvalidRequest]]]:
    """How many sound lines a file has, and the first wrong ones by their number. All are of one
    endpoint, if one is given."""
    seen: set[str] = set()
    wrong: list[tuple[int, InvalidRequest]] = []
    with path.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = BatchLine.parse(text) if text.strip() else None
                if line and line.endpoint != (endpoint or line.endpoint):
                    _refuse("url", f"must be the batch's endpoint, {endpoint}")
                if line and line.custom_id in seen:
                    _refuse("custom_id", "must not be that of an earlier line")
                seen |= {line.custom_id} if line else set()
            except InvalidRequest as error:
                wrong.append((number, error))
                if len(wrong) == SHOWN_ERRORS:
                    break
    return len(seen), wrong


def pending_lines(path: Path, done: Container[str]) -> Iterator[BatchLine]:
    """The lines of a checked file that are not done."""
    with path.open("rb") as lines:
        for text in lines:
            line = BatchLine.parse(text) if text.strip() else None
            if line and line.custom_id not in done:
                yield line


def answer_line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """The result of a request that was answered, also with an error."""
    response = {"status_code": status, "request_id": request_id, "body": json.loads(body)}
    return _line(request_id, custom_id, response, None)


def failure_line(custom_id: str, request_id: str, code: str, message: str) -> bytes:
    """The result of a request that was not."""
    return _line(request_id, custom_id, None, {"code": code, "message": message})


def _line(identity: str, custom_id: str, response: object, error: object) -> bytes:
    fields = {"id": identity, "custom_id": custom_id, "response": response, "error": error}
    # In ASCII: some split lines at every character that Unicode takes for an end of line.
    return json.dumps(fields).encode() + b"\n"


@dataclass(slots=True)
class TokenCounts:
    """Tokens of all answers in a file of results."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, usage: dict[str, Any]) -> None:
        """Chats and responses have different names for the same."""
        before = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        after = usage.get("output_tokens_details") or {}
        self.input += usage.get("input_tokens") or usage.get("prompt_tokens") or 0
        self.cached += before.get("cached_tokens", 0)
        self.output += usage.get("output_tokens") or usage.get("completion_tokens") or 0
        self.reasoning += after.get("reasoning_tokens", 0)


def count_tokens(path: Path) -> TokenCounts:
    counts = TokenCounts()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as results:
        for text in results:
            counts.add(json.loads(text)["response"]["body"].get("usage") or {})
    return counts


def finished_ids(path: Path) -> set[str]:
    """The ids of the results in a file, if there is one. A last line that was cut off is removed.
    Raises InvalidRequest where it has anything else."""
    found = set()
    try:
        with path.open("r+b") as results:
            end = 0
            for text in results:
                if not text.endswith(b"\n") and text.startswith(_OPENING[: len(text)]):
                    results.truncate(end)
                    break
                found.add(json.loads(text)["custom_id"])
                end += len(text)
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError):
        raise InvalidRequest(f"{path.name} has lines that are no results of a batch") from None
    return found

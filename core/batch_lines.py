"""Lines of a batch, as in the OpenAI API: requests in one file, results in another.

Results are appended as they come, so the results file also shows what is done: a run that continues
a batch skips the ids in it.
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
"""Statuses after which a retry may help."""

_OPENING = b'{"id": "'  # begins every result


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
        """Raises InvalidRequest for a wrong line, with the field's name."""
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
    """Returns the number of valid lines, and the errors of the first wrong ones by line number. All
    lines must be for `endpoint`, if it is given."""
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
    """The lines of a checked file whose ids are not in `done`."""
    with path.open("rb") as lines:
        for text in lines:
            line = BatchLine.parse(text) if text.strip() else None
            if line and line.custom_id not in done:
                yield line


def answer_line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """The result line of a request that was answered, even with an error."""
    response = {"status_code": status, "request_id": request_id, "body": json.loads(body)}
    return _line(request_id, custom_id, response, None)


def failure_line(custom_id: str, request_id: str, code: str, message: str) -> bytes:
    """The result line of a request that was not answered."""
    return _line(request_id, custom_id, None, {"code": code, "message": message})


def _line(identity: str, custom_id: str, response: object, error: object) -> bytes:
    fields = {"id": identity, "custom_id": custom_id, "response": response, "error": error}
    # ASCII only, since some readers split lines at any line separator of Unicode.
    return json.dumps(fields).encode() + b"\n"


@dataclass(slots=True)
class TokenCounts:
    """Token counts of all answers in a results file."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, usage: dict[str, Any]) -> None:
        """Adds an answer's usage. Chats and responses name its fields differently."""
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


def finished_ids(path: Path) -> dict[str, bool]:
    """Returns the ids in a results file, which may be missing, and whether each request was
    refused. Removes an incomplete last line. Raises InvalidRequest if the file has anything
    else."""
    found = {}
    try:
        with path.open("r+b") as results:
            end = 0
            for text in results:
                if not text.endswith(b"\n") and text.startswith(_OPENING[: len(text)]):
                    results.truncate(end)
                    break
                match json.loads(text):
                    case {"custom_id": str(name), "response": {"status_code": int(status)}}:
                        found[name] = status >= 400
                    case {"custom_id": str(name), "error": {}}:
                        found[name] = True
                    case _:
                        raise ValueError("a line is no result")
                end += len(text)
    except FileNotFoundError:
        pass
    except ValueError:
        raise InvalidRequest(f"{path.name} has lines that are not results of a batch") from None
    return found

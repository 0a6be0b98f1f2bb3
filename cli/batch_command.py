"""`baton batch`: runs a file of requests, as the OpenAI API's batches, against a running cluster.

The results file shows which requests are done, so that an interrupted run can continue.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from baton.cli.load_test import DEFAULT_URL, given_key
from baton.cli.terminal import AsJson, note, print_result, progress
from baton.connection import API_KEY_VARIABLE
from baton.core.batch_lines import (
    TRANSIENT,
    BatchLine,
    answer_line,
    check_lines,
    finished_ids,
    pending_lines,
)
from baton.core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    import httpx
    from rich.progress import Progress, TaskID

GIVE_UP_SECONDS = 120.0
"""A run ends after this long without any answer."""

LONGEST_PAUSE = 10.0


def batch(
    requests: Path = Argument(metavar="IN", help="Requests, as lines of JSON.", dir_okay=False),
    results: Path = Argument(
        metavar="OUT", help="Their results; finished requests are not repeated."
    ),
    url: str = Option(DEFAULT_URL, help="The router's HTTP address."),
    concurrency: int = Option(16, min=1, help="Requests at once."),
    api_key: str | None = Option(None, help=f"(default: {API_KEY_VARIABLE})", show_default=False),
    as_json: AsJson = False,
) -> None:
    """Run a file of requests with the lowest priority, or continue an interrupted run.

    Lines are as in the OpenAI API: {"custom_id": "1", "method": "POST", "url":
    "/v1/chat/completions", "body": {...}}. Exits with 1 if requests were refused,
    now or before.
    """
    from baton.cli.load_run import access, base_url, served_model

    total = _check(requests)
    done = _done(results)
    key = given_key(api_key)
    base = base_url(url)
    served_model(base, key)  # raises if no router answers
    with results.open("ab", buffering=0) as out, progress() as shown:
        task = shown.add_task("answered", total=total, completed=len(done), summary="")
        run = _Run(pending_lines(requests, done), out, shown, task, time.monotonic())
        try:
            asyncio.run(run.all(access(base, key), concurrency))
        except KeyboardInterrupt:
            note(f"interrupted; the same command runs the other {total - len(done) - run.ended}")
            raise
    answered, refused_before = run.ended - run.refused, sum(done.values())
    counts = {"answered": answered, "refused": run.refused, "before": len(done)}
    text = f"{answered} requests answered, {run.refused} refused, {len(done)} done before"
    text += f" ({refused_before} refused)" if refused_before else ""
    print_result({**counts, "refused_before": refused_before}, text, as_json)
    raise typer.Exit(1 if run.refused or refused_before else 0)


def _check(requests: Path) -> int:
    """Returns the number of lines. Raises InvalidRequest with the first wrong one."""
    try:
        total, wrong = check_lines(requests)
    except OSError as error:
        raise InvalidRequest(f"cannot read {requests}: {error.strerror}") from error
    if wrong:
        number, first = wrong[0]
        raise InvalidRequest(f"{requests}, line {number}: {first.message}")
    return total


def _done(results: Path) -> dict[str, bool]:
    try:
        results.touch()
        return finished_ids(results)
    except OSError as error:
        raise _unwritable(results, error) from error


def _unwritable(results: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"cannot write {results}: {error.strerror}")


def _append(out: FileIO, line: bytes) -> None:
    """Writes the whole line, or nothing: other lines may follow it. `out` is not buffered, so that
    a run that is killed loses no result."""
    end = out.seek(0, os.SEEK_END)
    left = line
    try:
        while left:
            left = left[out.write(left) :]
    except OSError as error:
        out.truncate(end)
        raise _unwritable(Path(out.name), error) from error


@dataclass(slots=True)
class _Run:
    pending: Iterator[BatchLine]
    out: FileIO
    shown: Progress
    task: TaskID
    answered_at: float
    ended: int = 0
    refused: int = 0

    async def all(self, server: dict[str, object], concurrency: int) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits, **server) as client:  # type: ignore[arg-type]
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(concurrency):
                        tasks.create_task(self._run_lines(client))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _run_lines(self, client: httpx.AsyncClient) -> None:
        for line in self.pending:
            response = await self._answer(client, line)
            request_id = response.headers.get("x-request-id", "")
            text = answer_line(line.custom_id, request_id, response.status_code, response.content)
            _append(self.out, text)
            self.ended += 1
            self.refused += response.is_error
            summary = f"{self.refused} refused" if self.refused else ""
            self.shown.update(self.task, advance=1, summary=summary)

    async def _answer(self, client: httpx.AsyncClient, line: BatchLine) -> httpx.Response:
        """Sends a line, again after transient failures."""
        import httpx

        pause, why = 0.5, ""
        while True:
            try:
                path = line.endpoint.removeprefix("/v1/")
                response = await client.post(path, json={"service_tier": "batch", **line.body})
                self.answered_at = time.monotonic()
                if response.status_code not in TRANSIENT:
                    return response
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
            if why and time.monotonic() > self.answered_at + GIVE_UP_SECONDS:
                raise Unavailable(f"no answer from {client.base_url}: {why}; run this again later")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

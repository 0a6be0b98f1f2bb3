"""/v1/files and /v1/batches with the OpenAI SDK, on a router in front of workers that answer at
once."""

from __future__ import annotations

import asyncio
import io
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest
from front_door import front_door
from openai.types import Batch

from baton.core.api_keys import make_key, write_keys
from baton.core.batch_lines import answer_line
from baton.core.config import BatchesConfig
from baton.core.errors import Exhausted
from baton.router.edges.http.batches import batch_runner
from baton.router.edges.http.batches.batch_runner import Results
from baton.router.edges.http.batches.batch_store import BatchRequest, BatchStore
from baton.router.edges.http.batches.file_store import FileStore
from baton.router.server import RouterServer

MODEL = "SmolLM2-135M-Instruct"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "POLL_SECONDS", 0.05)


def line(name: str, url: str = "/v1/chat/completions", **body: object) -> dict[str, object]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {**CHAT, **body}}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def chats(count: int, **body: object) -> bytes:
    return jsonl(*(line(f"line-{index}", **body) for index in range(count)))


def wanted(file_id: str) -> BatchRequest:
    return BatchRequest(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="1h"
    )


def sdk(server: RouterServer, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{server.http_address}/v1", api_key=key, max_retries=0
    )


@asynccontextmanager
async def door(
    folder: Path, step_seconds: float = 0.0, keys: str = "", **batches: object
) -> AsyncIterator[openai.AsyncOpenAI]:
    tree: dict[str, object] = {"batches": {"folder": str(folder), **batches}}
    async with (
        front_door(tree, step_seconds=step_seconds, keys=keys) as server,
        sdk(server) as client,
    ):
        yield client


async def start(
    client: openai.AsyncOpenAI,
    content: bytes,
    window: str = "24h",
    endpoint: Literal[
        "/v1/chat/completions", "/v1/embeddings", "/v1/responses"
    ] = "/v1/chat/completions",
) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window=window,  # type: ignore[arg-type]
        metadata={"why": "a test"},
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(60):
        while batch.status not in ENDED:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, object]]:
    """By custom_id, of which each must be there once."""
    assert file_id
    found = [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found)
    return by_id


def sum_of(output: dict[str, dict[str, object]], name: str) -> int:
    """Of a figure in the usage of all answers."""
    return sum(each["response"]["body"]["usage"][name] for each in output.values())  # type: ignore[index]


async def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    async with door(tmp_path / "batches") as client:
        content = chats(5) + jsonl(line("wrong", temperature=9), line("other", model="other"))
        batch = await start(client, content)
        assert (batch.status, batch.metadata) == ("validating", {"why": "a test"})
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert batch.request_counts
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (7, 5, 2)
        output = await results(client, batch.output_file_id)
        assert sorted(output) == [f"line-{index}" for index in range(5)]
        answer = output["line-0"]
        assert answer["error"] is None
        assert str(answer["id"]).startswith("batch_req_")
        response = answer["response"]
        assert isinstance(response, dict)
        assert response["status_code"] == 200
        assert batch.usage
        assert (batch.usage.output_tokens, batch.usage.output_tokens_details.reasoning_tokens) == (
            5 * 4,
            0,
        )
        assert batch.usage.total_tokens == sum_of(output, "total_tokens")
        chat = openai.types.chat.ChatCompletion.model_validate(response["body"])
        assert chat.usage
        assert chat.usage.completion_tokens == 4
        errors = await results(client, batch.error_file_id)
        statuses = {name: each["response"]["status_code"] for name, each in errors.items()}  # type: ignore[index]
        assert statuses == {"wrong": 400, "other": 404}


async def test_responses_of_a_batch_are_counted_too(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        asked = line("a", url="/v1/responses")
        asked["body"] = {"input": "Hello", "max_output_tokens": 3}
        batch = await ended(client, await start(client, jsonl(asked), endpoint="/v1/responses"))
        usage = sum_of(await results(client, batch.output_file_id), "output_tokens")
        assert batch.usage
        assert batch.usage.output_tokens == usage == 3
        assert batch.usage.input_tokens > 0


async def test_results_expire_as_the_batch_says(tmp_path: Path) -> None:
    async with door(tmp_path, keep_seconds=10_000.0) as client:
        file = await client.files.create(file=("in.jsonl", chats(1)), purpose="batch")
        for seconds, kept in ((7200, 7200), (86400, 10_000)):
            batch = await client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                output_expires_after={"anchor": "created_at", "seconds": seconds},
            )
            batch = await ended(client, batch)
            output = await client.files.retrieve(batch.output_file_id or "")
            assert output.expires_at == output.created_at + kept
        for wrong in ({"anchor": "created_at", "seconds": 10}, {"anchor": "now", "seconds": 7200}):
            with pytest.raises(openai.BadRequestError, match="output_expires_after"):
                await client.batches.create(
                    input_file_id=file.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    output_expires_after=wrong,  # type: ignore[arg-type]
                )


def test_a_result_that_the_disk_has_no_room_for_leaves_whole_lines(tmp_path: Path) -> None:
    store = BatchStore(files := FileStore(BatchesConfig(str(tmp_path))))
    file = files.upload("a", io.BytesIO(chats(2)), "in.jsonl", 3600.0)
    batch = store.create("a", wanted(file["id"]))
    first, second = (answer_line(f"line-{index}", "r", 200, b"{}") for index in range(2))
    with Results(store, "a", batch) as made:
        made.add(200, first)
        with largest_file(len(first) + 10), pytest.raises(OSError, match="No space left"):
            made.add(200, second)
        with largest_file(len(first)), pytest.raises(OSError, match="File too large"):
            made.add(200, second)
    with Results(store, "a", batch) as again:
        assert batch["request_counts"]["completed"] == 1
        assert [each.custom_id for each in again.pending(files.content("a", file["id"]))] == [
            "line-1"
        ]
        again.add(200, second)
        assert again.usage()["total_tokens"] == 0
        output, errors = again.publish()
    assert (output is not None, errors) == (True, None)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system writes no file beyond `size` bytes, as a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_nothing_of_what_it_has_no_room_for(tmp_path: Path) -> None:
    store = BatchStore(files := FileStore(BatchesConfig(str(tmp_path))))
    with largest_file(1000), pytest.raises(Exhausted, match="disk is full"):
        files.upload("a", io.BytesIO(chats(50)), "in.jsonl", 60.0)
    assert not list(files.folder("a").iterdir())
    file = files.upload("a", io.BytesIO(chats(1)), "in.jsonl", 60.0)
    with largest_file(10), pytest.raises(Exhausted, match="disk is full"):
        store.create("a", wanted(file["id"]))
    assert not list(files.folder("a").glob("batch_*"))


async def test_a_batch_embeds(tmp_path: Path) -> None:
    async with door(tmp_path / "batches") as client:
        asked = line("a", url="/v1/embeddings")
        asked["body"] = {"input": ["one", "two"], "normalize": False}
        batch = await ended(client, await start(client, jsonl(asked), endpoint="/v1/embeddings"))
        response = (await results(client, batch.output_file_id))["a"]["response"]
        assert isinstance(response, dict)
        assert [each["embedding"] for each in response["body"]["data"]] == [[3.0, 4.0]] * 2


async def test_lines_that_are_wrong_are_named_before_any_runs(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        content = jsonl(
            line("a"),
            line("a"),
            line("b", url="/v1/completions"),
            line("c", url="/v1/embeddings"),
            line("d", stream=True),
            {"custom_id": "e"},
            [],
        )
        batch = await ended(client, await start(client, b"\n" + content + b"{\n"))
        assert batch.status == "failed"
        assert batch.errors
        found = [(each.line, each.param) for each in batch.errors.data or ()]
        fields = ["custom_id", "url", "url", "body.stream", "url", None, None]
        assert found == list(zip(range(3, 10), fields, strict=True))
        empty = await ended(client, await start(client, b"\n"))
        assert empty.errors
        assert [each.code for each in empty.errors.data or ()] == ["empty_file"]


async def test_files_are_listed_retrieved_and_deleted(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        content = chats(2)
        files = [
            await client.files.create(file=(f"{index}.jsonl", content), purpose="batch")
            for index in range(3)
        ]
        file = await client.files.retrieve(files[0].id)
        assert (file.bytes, file.filename, file.purpose) == (len(content), "0.jsonl", "batch")
        assert (await client.files.content(file.id)).content == content
        listed = [each.id async for each in client.files.list(limit=2)]
        assert sorted(listed) == sorted(each.id for each in files)
        with pytest.raises(openai.BadRequestError, match="order must be asc or desc"):
            await client.files.list(order="up")  # type: ignore[arg-type]
        assert (await client.files.delete(file.id)).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no 'file-"):
                await call(file.id)
        for name in ("file-x", "../lock", "%2e%2e%2flock"):
            with pytest.raises(openai.NotFoundError):
                await client.files.content(name)


@pytest.mark.parametrize(
    ("fields", "file", "message"),
    [
        ({"purpose": "assistants"}, b"{}", "purpose"),
        ({}, b"{}", "purpose"),
        ({"purpose": "batch"}, None, "file is missing"),
        ({"purpose": "batch", "expires_after[seconds]": "1"}, b"{}", "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": ["3600"] * 2}, b"{}", "expires_after"),
    ],
)
async def test_a_wrong_upload_is_refused(
    fields: dict[str, object], file: bytes | None, message: str, tmp_path: Path
) -> None:
    async with door(tmp_path) as client:
        parts = {"file": ("in.jsonl", file)} if file else {"other": ("in.jsonl", b"")}
        url = f"{client.base_url}files"
        async with httpx.AsyncClient() as plain:
            answer = await plain.post(url, data=fields, files=parts)
            assert (answer.status_code, message in answer.text) == (400, True)
            assert (await plain.post(url, json=fields)).status_code == 415


async def test_each_key_has_its_own(tmp_path: Path) -> None:
    made = {name: make_key(name, rate=100.0, concurrency=1) for name in ("one", "two")}
    keys = tmp_path / "keys.yaml"
    write_keys(keys, [key for _, key in made.values()])
    async with door(tmp_path / "batches", keys=str(keys)) as anonymous:
        one, two = (anonymous.with_options(api_key=secret) for secret, _ in made.values())
        # More lines at once than its concurrency allows other requests.
        batch = await ended(one, await start(one, chats(20)))
        assert batch.status == "completed"
        assert batch.output_file_id
        with pytest.raises(openai.AuthenticationError):
            await anonymous.batches.retrieve(batch.id)
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        for file_id in (batch.input_file_id, batch.output_file_id):
            with pytest.raises(openai.NotFoundError):
                await two.files.content(file_id)
        with pytest.raises(openai.NotFoundError) as refused:
            await two.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
        assert refused.value.param == "input_file_id"
        assert [each.id async for each in two.files.list()] == []
        assert [each.id async for each in two.batches.list()] == []
        assert [each.id async for each in one.batches.list()] == [batch.id]


async def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    async with door(tmp_path, step_seconds=0.01, max_requests=2) as client:
        batch = await start(client, chats(200, max_tokens=20))
        while not (counts := batch.request_counts) or not counts.completed:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await ended(client, batch)
        assert batch.status == "cancelled"
        assert batch.request_counts
        done = await results(client, batch.output_file_id)
        assert 0 < len(done) == batch.request_counts.completed < 200
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(batch.id)


async def test_a_batch_ends_with_its_window(tmp_path: Path) -> None:
    async with door(tmp_path, step_seconds=0.01, max_requests=2) as client:
        batch = await ended(client, await start(client, chats(300, max_tokens=20), "2s"))
        assert batch.status == "expired"
        done = await results(client, batch.output_file_id)
        late = await results(client, batch.error_file_id)
        assert len(done) + len(late) == 300
        codes = {each["error"]["code"] for each in late.values()}  # type: ignore[index]
        assert codes == {"batch_expired"}


async def test_a_restarted_router_runs_only_what_is_left(tmp_path: Path) -> None:
    async with door(tmp_path, step_seconds=0.01, max_requests=4) as client:
        batch = await start(client, chats(60, max_tokens=20))
        while not (counts := batch.request_counts) or counts.completed < 5:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    output = tmp_path / "tenant-" / f"file-{batch.id.removeprefix('batch_')}-output.jsonl"
    before = output.read_bytes()
    assert before.count(b"\n") < 60
    # As if the power had gone in the middle of a line.
    output.write_bytes(before + b'{"id": "batch_req_')
    async with door(tmp_path) as client:
        batch = await ended(client, batch)
        assert batch.status == "completed"
        output_lines = await results(client, batch.output_file_id)
        assert len(output_lines) == 60
        assert batch.usage
        assert batch.usage.input_tokens == sum_of(output_lines, "prompt_tokens")
    assert output.read_bytes().startswith(before)


async def test_routers_share_a_folder(tmp_path: Path) -> None:
    """One runs the batches of both, and each can cancel them."""
    async with door(tmp_path, step_seconds=0.01) as one, door(tmp_path, step_seconds=0.01) as two:
        batches = [await start(client, chats(10)) for client in (one, two)]
        for batch in batches:
            batch = await ended(two, batch)
            assert batch.status == "completed"
            assert len(await results(one, batch.output_file_id)) == 10
        for client in (one, two):
            batch = await start(client, chats(200, max_tokens=100))
            await client.batches.cancel(batch.id)
            assert (await ended(client, batch)).status == "cancelled"


def test_what_has_expired_is_deleted(tmp_path: Path) -> None:
    config = BatchesConfig(str(tmp_path), keep_seconds=100.0)
    store = BatchStore(files := FileStore(config))
    kept, old = (files.upload("a", io.BytesIO(b"{}"), "x", keep) for keep in (100.0, -1.0))
    batch = store.create("a", wanted(kept["id"]))
    batch["created_at"] -= 200
    store.save("a", batch)
    store.sweep()
    assert [file["id"] for file in files.files("a")] == [kept["id"]]
    assert not files.content("a", old["id"]).exists()
    assert [each["id"] for each in store.batches("a")] == [batch["id"]]  # it has not ended
    store.end("a", batch, "completed", {})
    store.sweep()
    assert store.batches("a") == []


async def test_a_batch_without_its_file_fails(tmp_path: Path) -> None:
    async with door(tmp_path, step_seconds=0.01, max_requests=2) as client:
        batch = await start(client, chats(200, max_tokens=20))
        while batch.status != "in_progress":
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
        await client.files.delete(batch.input_file_id)
    async with door(tmp_path) as client:
        batch = await ended(client, batch)
        assert (batch.status, bool(batch.errors)) == ("failed", True)
        assert "was deleted" in batch.model_dump_json()


async def test_files_have_a_budget(tmp_path: Path) -> None:
    content = chats(10)
    async with door(tmp_path, budget=len(content) + 1000) as client:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="delete some"):
            await client.files.create(file=("in.jsonl", content), purpose="batch")
        await client.files.delete(file.id)
        await client.files.create(file=("in.jsonl", content), purpose="batch")


async def test_without_a_folder_nothing_is_kept() -> None:
    async with front_door() as server, sdk(server) as client:
        with pytest.raises(openai.BadRequestError, match=r"batches\.folder is not set"):
            await client.files.create(file=("in.jsonl", chats(1)), purpose="batch")
        with pytest.raises(openai.BadRequestError, match=r"batches\.folder is not set"):
            await client.batches.list()

"""Limits of the gRPC and HTTP edges on messages, bodies and connections."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from front_door import front_door

from baton import AsyncClient, Exhausted, InvalidRequest, PromptTooLong
from baton.core.bounds import MAX_REQUEST_BYTES, MAX_VALUES
from baton.router.edges.http import http_server
from baton.router.server import RouterServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[RouterServer]:
    async with front_door() as server:
        yield server


async def post(door: RouterServer, content: bytes) -> httpx.Response:
    url = f"http://{door.http_address}/v1/completions"
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(url, content=content, headers={"content-type": "application/json"})


BODIES = {
    "ids": b'{"prompt":[' + b"1," * MAX_VALUES + b"1]}",
    "empty lists": b'{"prompt":[' + b"[]," * (MAX_VALUES // 2) + b"[]]}",
    "objects": b'{"a":[' + b"{}," * (MAX_VALUES // 2) + b"{}]}",
    "keys": b'{"a":{' + b'"k" :1,' * (MAX_VALUES // 4) + b'"k":1}}',
}


@pytest.mark.parametrize("body", BODIES)
async def test_a_body_with_too_many_values_is_refused(door: RouterServer, body: str) -> None:
    response = await post(door, BODIES[body])
    assert (response.status_code, f"{MAX_VALUES} values" in response.text) == (413, True)


async def test_a_long_text_is_parsed_and_exceeds_the_context(door: RouterServer) -> None:
    response = await post(door, json.dumps({"prompt": "word " * 1_500_000}).encode())
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_grpc_message_has_limits(door: RouterServer) -> None:
    async with AsyncClient(door.address) as client:
        with pytest.raises(InvalidRequest, match=r"too large: .*larger than max.*8388608"):
            await client.generate("x" * (MAX_REQUEST_BYTES + 1))
        with pytest.raises(InvalidRequest, match="token_ids must have at most 2000000 entries"):
            await client.generate([1] * 2_000_001)
        with pytest.raises(InvalidRequest, match=r"chat\.messages must have at most 4096 entries"):
            await client.chat([("user", "x")] * 4097)
        with pytest.raises(PromptTooLong):
            await client.generate([1] * 8192)


async def test_answers_that_can_never_run_at_once_are_refused_for_good() -> None:
    async with front_door(max_requests=3, step_seconds=0.01) as door:
        url = f"http://{door.http_address}/v1/"
        async with (
            AsyncClient(door.address) as client,
            httpx.AsyncClient(base_url=url) as http,
            client.stream("Hello", max_tokens=1000) as stream,
        ):
            await anext(stream)
            with pytest.raises(Exhausted, match="1 requests are running"):
                await client.generate("Hello", n=3)
            with pytest.raises(InvalidRequest, match="allows 3 concurrent answers"):
                await client.generate("Hello", n=4)
            with pytest.raises(InvalidRequest, match="allows 3 concurrent answers"):
                await client.embed(["Hello"] * 4)
            two = await http.post("completions", json={"prompt": ["a", "b"], "n": 1})
            three = await http.post("completions", json={"prompt": ["a", "b", "c"], "n": 1})
            four = await http.post("completions", json={"prompt": ["a", "b"], "n": 2})
    assert [each.status_code for each in (two, three, four)] == [200, 429, 400]
    assert "retry-after" in three.headers
    assert "retry-after" not in four.headers
    assert (four.json()["error"]["param"], four.json()["error"]["code"]) == ("n", "invalid_request")


async def until_closed(door: RouterServer, *pieces: bytes) -> None:
    """Returns when the router has closed a connection that sends these, one by one."""
    host, _, port = door.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)

    sending = asyncio.ensure_future(send())
    # The router resets a connection that still sends when it is closed.
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    sending.cancel()
    writer.close()


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("head", [b"", HEAD])
async def test_an_unfinished_head_times_out(
    door: RouterServer, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    await until_closed(door, head)
    await until_closed(door, head, *[b"a"] * 1000)


async def test_an_unfinished_second_head_times_out(
    door: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    await until_closed(door, HEAD + b"\r\n", *[b"G"] * 1000)


async def sent(door: RouterServer, head: bytes) -> tuple[int, str, str]:
    """The status, type and error message that answer these bytes."""
    host, _, port = door.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    await writer.drain()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    lines, _, body = answer.decode().partition("\r\n\r\n")
    status, *fields = lines.split("\r\n")
    headers = dict(field.lower().split(": ", 1) for field in fields)
    message: str = json.loads(body)["error"]["message"]
    return int(status.split()[1]), headers["content-type"], message


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LARGE = 3 * MAX_REQUEST_BYTES
TOO_LARGE = {
    "announced": POST + b"content-length: %d\r\n\r\n" % LARGE + b" " * LARGE,
    "in chunks": POST
    + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % LARGE
    + b" " * LARGE
    + b"\r\n0\r\n\r\n",
    "not sent yet": POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % LARGE,
    "endless": POST + b"content-length: %d\r\n\r\n" % 2**50 + b" ",
}


@pytest.mark.parametrize("case", TOO_LARGE)
async def test_a_client_that_sends_too_much_still_gets_its_answer(
    door: RouterServer, case: str
) -> None:
    status, kind, message = await sent(door, TOO_LARGE[case])
    assert (status, kind) == (413, "application/json")
    assert f"at most {MAX_REQUEST_BYTES} bytes" in message


WRONG_HEADS = {
    "long": (HEAD + b"x: " + b"y" * 17_000 + b"\r\n\r\n", 431, "at most 16384 bytes"),
    "many fields": (HEAD + b"x: y\r\n" * 3000 + b"\r\n", 431, "at most 16384 bytes"),
    "long and unfinished": (HEAD + b"x: " + b"y" * 20_000, 431, "at most 16384 bytes"),
    "no HTTP": (b"hello\r\n\r\n", 400, "illegal request line"),
    "HTTP/9.9": (b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n", 505, "HTTP/9.9 is not served"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/2.0 is not served"),
    "bad chunk": (
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        400,
        "illegal chunk header",
    ),
    "two lengths": (
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "Content-Length and Transfer-Encoding contradict each other",
    ),
}


@pytest.mark.parametrize("case", WRONG_HEADS)
async def test_what_is_no_request_gets_an_error_as_json(door: RouterServer, case: str) -> None:
    head, wanted, words = WRONG_HEADS[case]
    status, kind, message = await sent(door, head)
    assert (status, kind) == (wanted, "application/json")
    assert words in message
    assert "bytearray" not in message


async def test_a_proxys_target_in_absolute_form_finds_its_path(door: RouterServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{door.http_address}") as client:
        for path in ("/health", "/v1/models?a=b"):
            target = f"http://host:8000{path}".encode()
            response = await client.get("/", extensions={"target": target})
            assert response.status_code == 200, path


async def test_a_head_within_the_limit_is_served(door: RouterServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{door.http_address}") as client:
        response = await client.get("/health", headers={"x": "y" * 16_000})
    assert response.status_code == 200


async def test_a_compressed_body_is_refused_by_name(door: RouterServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{door.http_address}") as client:
        response = await client.post(
            "/v1/completions",
            content=gzip.compress(b'{"prompt": "x"}'),
            headers={"content-type": "application/json", "content-encoding": "gzip"},
        )
    assert response.status_code == 415
    assert 'Content-Encoding is "gzip"' in response.json()["error"]["message"]


async def test_a_number_with_too_many_digits_is_refused(door: RouterServer) -> None:
    response = await post(door, b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}")
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("a number must have at most 4096 digits")


async def test_an_unknown_path_is_told_what_is_served(door: RouterServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{door.http_address}") as client:
        response = await client.post("/v1/assistants", json={})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert "/v1/assistants" in message
    assert "/v1/chat/completions, /v1/completions" in message

"""The connection that writes chunks by itself, against the library's own."""

from __future__ import annotations

import h11
import pytest

from baton.router.edges.http.http_server import ChunkingConnection

CONTENT = [b"data: a\n\n", b"", b"x" * 300]
LENGTH = [(b"content-length", str(sum(map(len, CONTENT))).encode())]


def answered(connection: h11.Connection, request: bytes, headers: list[tuple[bytes, bytes]]) -> str:
    """What the connection has sent when it has answered one request."""
    connection.receive_data(request)
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    body = b"HEAD" not in request
    events = [
        h11.Response(status_code=200, headers=headers),
        *(h11.Data(data=piece) for piece in CONTENT if body),
        h11.EndOfMessage(),
    ]
    return b"".join(connection.send(event) or b"" for event in events).decode()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("headers", [[], LENGTH])
def test_chunks_are_framed_as_h11_does(
    version: str, method: str, headers: list[tuple[bytes, bytes]]
) -> None:
    request = f"{method} / HTTP/{version}\r\nhost: x\r\n\r\n".encode()
    ours, theirs = ChunkingConnection(h11.SERVER), h11.Connection(h11.SERVER)
    assert answered(ours, request, headers) == answered(theirs, request, headers)
    assert ours.our_state is theirs.our_state


def test_a_kept_connection_frames_each_answer_as_its_headers_say() -> None:
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    ours, theirs = ChunkingConnection(h11.SERVER), h11.Connection(h11.SERVER)
    for headers in ([], LENGTH, []):
        assert answered(ours, request, headers) == answered(theirs, request, headers)
        for connection in (ours, theirs):
            connection.start_next_cycle()


@pytest.mark.parametrize(
    ("request_line", "target"),
    [
        ("GET http://host:8000/health", b"/health"),
        ("GET HTTPS://host/v1/requests?limit=2&a=http://b/c", b"/v1/requests?limit=2&a=http://b/c"),
        ("GET http://[::1]:8000/v1/models/http://x", b"/v1/models/http://x"),
        ("GET http://host", b"/"),
        ("GET http://host?a=b", b"/?a=b"),
        ("OPTIONS http://host:8000", b"*"),
        ("OPTIONS *", b"*"),
        ("GET /http://host/health", b"/http://host/health"),
        ("GET http:///health", b"http:///health"),
        ("GET ftp://host/health", b"ftp://host/health"),
    ],
)
def test_targets_in_absolute_form_are_reduced_to_path_and_query(
    request_line: str, target: bytes
) -> None:
    """RFC 9112, 3.2.2: servers must accept them, in spite of what Host says."""
    connection = ChunkingConnection(h11.SERVER)
    connection.receive_data(f"{request_line} HTTP/1.1\r\nhost: other\r\n\r\n".encode())
    head = connection.next_event()
    assert isinstance(head, h11.Request)
    assert head.target == target
    assert (b"host", b"other") in list(head.headers)

"""TLS, from outside: between clients, a router and its workers."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from front_door import front_door
from starlette.responses import PlainTextResponse
from typer.testing import CliRunner

from baton import AsyncClient, Client, InvalidConfig, Unavailable
from baton.cli.app import app
from baton.core import config as configs
from baton.core.config import TlsConfig
from baton.core.tls import check_router, check_worker
from baton.router.edges.http import http_server
from baton.router.edges.http.http_server import HttpServer
from baton.v1 import worker_pb2_grpc

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certs"
    result = CliRunner().invoke(app, ["certs", str(folder), "--host", "gpu-7"])
    assert result.exit_code == 0, result.output
    return folder


def only(folder: Path, source: Path, *names: str) -> Path:
    """A folder with some of another's files."""
    folder.mkdir()
    for name in names:
        shutil.copy(source / name, folder)
    return folder


def test_keys_of_certificates_are_their_owners_alone(certs: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in certs.glob("*.key")}
    names = ("ca.key", "node.key", "clients-ca.key", "client.key")
    assert modes == dict.fromkeys(names, 0o600)


def test_an_authority_that_is_there_signs_again(certs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(certs, folder)
    CliRunner().invoke(app, ["certs", str(folder)])
    assert (folder / "ca.pem").read_bytes() == (certs / "ca.pem").read_bytes()
    assert (folder / "node.pem").read_bytes() != (certs / "node.pem").read_bytes()


async def test_a_router_speaks_tls_with_clients_and_workers(certs: Path, tmp_path: Path) -> None:
    trusting = only(tmp_path / "client", certs, "ca.pem")
    async with front_door({"tls": {"folder": str(certs)}}) as door:
        async with AsyncClient(door.address, tls=trusting) as client:
            assert (await client.generate("Hello", max_tokens=3)).usage.completion_tokens == 3
        async with AsyncClient(door.address) as client:
            with pytest.raises(Unavailable):
                await client.models()
        context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
        url = f"https://{door.http_address}"
        async with httpx.AsyncClient(base_url=url, verify=context) as http:
            assert (await http.get("/ready")).status_code == 200
            sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
            answer = await sdk.chat.completions.create(model="", **CHAT)  # type: ignore[call-overload]
            assert answer.usage.completion_tokens == 3
            metrics = await http.get(f"https://{door.metrics_address}/metrics")
            assert metrics.status_code == 200
        async with httpx.AsyncClient(base_url=url) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get("/ready")


async def test_a_stop_waits_for_no_idle_client(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that keeps a connection for later reads nothing, and does not answer its end."""
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.0)
    tls = TlsConfig(folder=str(certs))
    server = HttpServer(PlainTextResponse("yes"), lambda: None, tls)
    host, _, port = server.start("127.0.0.1", 0).rpartition(":")
    trusting = ssl.create_default_context(cafile=str(certs / "ca.pem"))

    def ask() -> ssl.SSLSocket:
        connection = socket.create_connection((host, int(port)))
        client = trusting.wrap_socket(connection, server_hostname=host)
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        while not client.recv(1000).endswith(b"yes"):
            pass
        return client

    with await asyncio.to_thread(ask):
        async with asyncio.timeout(20):
            await server.stop(grace=60)


async def test_clients_can_be_made_to_show_a_certificate(certs: Path, tmp_path: Path) -> None:
    trusting = only(tmp_path / "client", certs, "ca.pem")
    known = only(tmp_path / "known", certs, "ca.pem", "client.pem", "client.key")
    tls = {"folder": str(certs), "client_certificates": True}
    async with front_door({"tls": tls}) as door:
        async with AsyncClient(door.address, tls=known) as client:
            await client.generate("Hello", max_tokens=3)
        async with AsyncClient(door.address, tls=trusting) as client:
            with pytest.raises(Unavailable):
                await client.models()
        url = f"https://{door.http_address}"
        context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
        async with httpx.AsyncClient(base_url=url, verify=context) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/ready")
        context.load_cert_chain(certs / "client.pem", certs / "client.key")
        async with httpx.AsyncClient(base_url=url, verify=context) as http:
            assert (await http.get("/ready")).status_code == 200


async def test_a_client_is_no_router_for_a_worker(certs: Path) -> None:
    async with front_door({"tls": {"folder": str(certs)}}) as door:
        (worker, *_) = door._config.members.workers
        credentials = grpc.ssl_channel_credentials(
            (certs / "ca.pem").read_bytes(),
            (certs / "client.key").read_bytes(),
            (certs / "client.pem").read_bytes(),
        )
        async with grpc.aio.secure_channel(worker, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await worker_pb2_grpc.WorkerStub(channel).Attach().read()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_folder_without_certificates_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"ca\.pem"):
        Client("127.0.0.1:1", tls=tmp_path)


def test_clients_with_certificates_need_no_keys_and_workers_need_tls() -> None:
    beyond: dict[str, object] = {"router": {"host": "0.0.0.0"}}
    mutual = {"folder": "certs", "client_certificates": True}
    check_router(configs.parse({**beyond, "tls": mutual}))
    with pytest.raises(InvalidConfig, match="which requires no key"):
        check_router(configs.parse({**beyond, "tls": {"folder": "certs"}}))
    check_worker(configs.parse({}), "127.0.0.1")
    check_worker(configs.parse({"insecure": True}), "10.0.0.5")
    check_worker(configs.parse({"tls": {"folder": "certs"}}), "10.0.0.5")
    with pytest.raises(InvalidConfig, match=r"worker at 10\.0\.0\.5"):
        check_worker(configs.parse({}), "10.0.0.5")

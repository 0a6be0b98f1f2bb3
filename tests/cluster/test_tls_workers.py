"""Real workers behind certificates."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from processes import ProcessCluster
from tiny_models import TINY_MODELS, save

from baton.cli.certificates import make_certificates
from baton.v1 import worker_pb2, worker_pb2_grpc

SIZES: dict[str, object] = {"kv_memory": "4MiB", "threads": 1}


def test_workers_listen_to_their_router_and_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["127.0.0.1"], 1)
    save(TINY_MODELS["llama"], tmp_path / "model")
    monkeypatch.setenv("BATON_TLS", str(certs))
    tree: dict[str, object] = {"tls": {"folder": str(certs)}, "prefill": SIZES, "decode": SIZES}
    with ProcessCluster(tmp_path / "model", tmp_path, tree=tree) as cluster:
        with cluster.client() as client:
            assert client.generate([1, 2, 3], max_tokens=5).usage.completion_tokens == 5
            addresses = [worker.member.address for worker in client.status().workers]
        authority = grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes())
        for address in addresses:
            for channel in (
                grpc.insecure_channel(address),
                grpc.secure_channel(address, authority),
            ):
                hello = worker_pb2.RouterMessage(hello=worker_pb2.Hello(protocol=2))
                with channel, pytest.raises(grpc.RpcError) as refused:
                    next(worker_pb2_grpc.WorkerStub(channel).Attach(iter([hello])))
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

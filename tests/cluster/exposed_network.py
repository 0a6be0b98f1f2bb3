"""What a host that belongs to no cluster can do to workers on two hosts, and what keeps it out.

test_exposed_network.py runs this file in namespaces of its own. SECURITY.md says what follows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stranger
from network import Host, Network, reaches
from processes import ProcessCluster
from tiny_models import TINY_MODELS, save

from baton.cli.certificates import make_certificates
from baton.cli.exposure import listeners

PROMPT = list(range(1, 80))
UNAVAILABLE = "StatusCode.UNAVAILABLE"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(TINY_MODELS["llama"], folder)
    return folder


@contextmanager
def two_hosts(
    network: Network, model: Path, folder: Path, tree: dict[str, object]
) -> Iterator[ProcessCluster]:
    hosts = {"prefill": network.near, "decode": network.far}
    section = {"kv_memory": "4MiB", "threads": 1}
    with ProcessCluster(
        model,
        folder,
        tree=tree,
        per_worker={
            f"{role}-0": {role: {**section, "host": host.address}} for role, host in hosts.items()
        },
        before={f"{role}-0": [*host.enter, "env", "UCX_TLS=tcp"] for role, host in hosts.items()},
    ) as running:
        yield running


def tries(host: Host, address: str, *authority: str) -> dict[str, object]:
    """What stranger.py finds from that host."""
    command = [*host.enter, "env", "UCX_TLS=tcp", sys.executable, stranger.__file__, address]
    ended = subprocess.run([*command, *authority], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


def answer(cluster: ProcessCluster, salt: str) -> tuple[int, ...]:
    with cluster.client() as client:
        return client.generate(PROMPT, max_tokens=8, ignore_eos=True, cache_salt=salt).token_ids


def test_without_tls_whoever_reaches_a_worker_reads_and_writes_its_pages(
    network: Network, elsewhere: Host, model: Path, tmp_path: Path
) -> None:
    """Hence a worker listens beyond loopback without TLS only with `insecure`."""
    with two_hosts(network, model, tmp_path, {"insecure": True}) as cluster:
        found = tries(elsewhere, cluster.worker_address("decode-0"))
        assert (found["wrote"], found["read"]) == (True, 0x5A)


def test_with_tls_a_stranger_does_not_learn_where_pages_are(
    network: Network, elsewhere: Host, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["127.0.0.1", network.near.address, network.far.address], 1)
    monkeypatch.setenv("BATON_TLS", str(certs))
    with two_hosts(network, model, tmp_path, {"tls": {"folder": str(certs)}}) as cluster:
        expected = answer(cluster, "before")
        for name in ("prefill-0", "decode-0"):
            address = cluster.worker_address(name)
            for authority in ([], [str(certs / "ca.pem")]):
                assert tries(elsewhere, address, *authority) == {"refused": UNAVAILABLE}
        assert answer(cluster, "after") == expected


def test_ucx_listens_beside_grpc_and_only_the_network_keeps_strangers_from_it(
    network: Network, elsewhere: Host, model: Path, tmp_path: Path
) -> None:
    with two_hosts(network, model, tmp_path, {"insecure": True}) as cluster:
        worker = cluster.workers["decode-0"].pid
        own = int(cluster.worker_address("decode-0").rpartition(":")[2])
        metrics = int(cluster.workers["decode-0"].wait_for(r"metrics on \S+:(\d+)"))
        ports = {port for address, port in listeners(worker) if address != "127.0.0.1"}
        assert {own, metrics} < ports
        reached = {port for port in ports if reaches(elsewhere, network.far, port)}
        assert reached == ports
        network.keep_out(elsewhere)
        assert not any(reaches(elsewhere, network.far, port) for port in ports)
        assert len(answer(cluster, "kept out")) == 8

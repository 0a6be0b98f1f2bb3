"""What a host that belongs to no cluster can do at the ports of a Ray of two hosts, and at the
controller.

test_exposed_network.py runs this file in namespaces of its own. SECURITY.md says what follows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stranger_at_ray
import yaml
from network import Host, Network, reaches
from ray_nodes import OPTIONS, RAY, TOKEN
from serving import BATON, FREE_PORTS, Command
from stranger_at_ray import Tried
from tiny_models import TINY_MODELS, save

from baton.cli.certificates import make_certificates
from baton.cli.exposure import listeners

PORT = 6379
CONTROLLER = 51000


@pytest.fixture(scope="module")
def nodes(network: Network) -> Iterator[list[Command]]:
    """A head on one host and a node on the other."""
    # Short, since sockets of Ray have their names in it.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
    joined = [f"--address={network.near.address}:{PORT}"]
    started: list[Command] = []
    try:
        for host, options in ((network.near, head), (network.far, joined)):
            where = [f"--node-ip-address={host.address}", f'--resources={{"{host.name}": 1}}']
            command = [*host.enter, RAY, "start", "--block", *where, *OPTIONS, *options]
            started.append(Command(folder / host.name, command, TOKEN))
            started[-1].wait_for("Ray runtime started")
        yield started
    finally:
        for node in started:
            node.end()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving(network: Network, folder: Path, tree: dict[str, object]) -> Iterator[Command]:
    """A cluster with a worker on each host; its command is on the first."""
    save(TINY_MODELS["llama"], folder / "model")
    section = {"kv_memory": "4MiB", "threads": 1}
    tree = {
        "model": str(folder / "model"),
        "controller": {"port": CONTROLLER},
        "prefill": {**section, "resources": {"near": 1}},
        "decode": {**section, "resources": {"far": 1}},
        **tree,
    }
    (folder / "baton.yaml").write_text(yaml.safe_dump(tree))
    flags = ["--config", str(folder / "baton.yaml"), *FREE_PORTS]
    flags += ["--ray-address", f"{network.near.address}:{PORT}"]
    command = Command(folder / "serve", [*network.near.enter, BATON, "serve", *flags], TOKEN)
    try:
        command.wait_for("Ctrl-C stops it")
        yield command
        command.send(signal.SIGINT)
        assert command.wait() == 0
    finally:
        command.end()


def reachable(nodes: list[Command], network: Network) -> set[str]:
    """Where processes of Ray's nodes listen beyond their own host."""
    found = set()
    for node, host in zip(nodes, (network.near, network.far), strict=True):
        for pid in node.processes():
            ports = {port for address, port in listeners(pid) if not address.startswith("127.")}
            found |= {f"{host.address}:{port}" for port in ports}
    return found


def tries(host: Host, addresses: set[str]) -> dict[str, Tried]:
    """What stranger_at_ray.py finds from that host."""
    command = [*host.enter, sys.executable, stranger_at_ray.__file__, *sorted(addresses)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, **TOKEN}
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Tried] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_ray_asks_everyone_for_its_token_and_the_controller_for_a_certificate(
    network: Network, elsewhere: Host, nodes: list[Command], tmp_path: Path
) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["127.0.0.1", network.near.address, network.far.address], 1)
    with serving(network, tmp_path, {"tls": {"folder": str(certs)}}):
        found = tries(elsewhere, reachable(nodes, network))
        answers = [each["grpc"] for each in found.values() if each["grpc"]]
        assert {code for each in answers for code in each.values()} == {"UNAUTHENTICATED"}
        # They are methods of these services: with the token they answer.
        asked = {method for each in answers for method in each}
        assert asked == {name for name in stranger_at_ray.METHODS if name.startswith("ray.")}
        opened = {code for each in found.values() for code in each["with_token"].values()}
        assert "OK" in opened
        assert "UNAUTHENTICATED" not in opened
        # Ray's own metrics are open; its agents' other ports ask for the token.
        assert {each["http"] for each in found.values()} == {0, 200, 401}
        assert found[f"{network.near.address}:{CONTROLLER}"] == {
            "grpc": {},
            "with_token": {},
            "http": 0,
        }


def test_without_tls_whoever_reaches_the_controller_commands_the_fleet(
    network: Network, elsewhere: Host, nodes: list[Command], tmp_path: Path
) -> None:
    """Hence a worker listens beyond loopback without TLS only with `insecure`."""
    address = f"{network.near.address}:{CONTROLLER}"
    with serving(network, tmp_path, {"insecure": True}):
        found = tries(elsewhere, {address})[address]
        assert found["grpc"] == {"baton.v1.Control/Pools": "OK", "baton.v1.Membership/Report": "OK"}
        assert reaches(elsewhere, network.near, CONTROLLER)
        network.keep_out(elsewhere)
        assert not reaches(elsewhere, network.near, CONTROLLER)

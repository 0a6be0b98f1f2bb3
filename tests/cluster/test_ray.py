"""Clusters on a Ray that somebody else runs."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from ray.util import get_node_ip_address
from serving import BATON, FREE_PORTS, Command, Serve, run
from tiny_hub import TinyHub
from tiny_models import TINY_MODELS, save

from baton import Client
from baton.cluster.ports import free_port
from baton.cluster.ray_session import check_ray
from baton.core.errors import InvalidConfig

# As a user would say it; the token is otherwise one file for all of a user's clusters.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


class RayHead(Command):
    """A Ray of one node, run by `ray start`. Ended by its session, never by `ray stop`."""

    def __init__(self, workspace: Path, environment: dict[str, str] | None = None) -> None:
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        ray = str(Path(sys.executable).with_name("ray"))
        options = ["--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
        options.append('--resources={"read": 1, "write": 1}')
        ports = [f"--port={self.address.rpartition(':')[2]}", "--dashboard-agent-listen-port=0"]
        # Nothing here adds nodes or collects logs.
        without = ["--include-dashboard=false", "--no-monitor", "--include-log-monitor=false"]
        folder = ["--disable-usage-stats", f"--temp-dir={workspace}"]
        super().__init__(
            workspace,
            [ray, "start", *options, *ports, *without, *folder],
            {**(environment or {}), **TOKEN},
        )

    def actors(self) -> list[str]:
        titles = ("ray::WorkerActor", "ray::RouterActor", "ray::Controller")
        return [line for line in self.processes().values() if line.startswith(titles)]

    def wait_without_actors(self, others: int = 0) -> None:
        """Waits until at most `others` are left, the actors of a cluster that goes on."""
        deadline = time.monotonic() + 10.0
        while len(left := self.actors()) > others:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def runs(self) -> bool:
        return any("raylet" in line for line in self.processes().values())


@pytest.fixture(scope="module")
def node_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the node keeps what it downloads."""
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def head(hub: TinyHub, node_home: Path) -> Iterator[RayHead]:
    # Not pytest's folder: Ray has sockets there, whose paths must be short.
    workspace = Path(tempfile.mkdtemp(prefix="ray-"))
    ray = RayHead(workspace, hub.environment(node_home))
    try:
        ray.wait_for("Ray runtime started")
        yield ray
    finally:
        ray.end()
        shutil.rmtree(workspace, ignore_errors=True)


def serve(workspace: Path, head: RayHead, model: Path) -> Serve:
    flags = ["--ray-address", head.address, "--insecure", "--model", str(model)]
    return Serve(workspace, *flags, "--kv-memory", "4MiB", environment=TOKEN)


@dataclass(frozen=True)
class Detached:
    """A cluster that outlives the command which has started it."""

    command: Serve
    flags: list[str]
    config: Path
    controller: str


@pytest.fixture(scope="module")
def detached(
    head: RayHead, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Detached]:
    host = get_node_ip_address()
    port = free_port(host)
    settings = {
        "insecure": True,
        "model": str(tiny),
        "controller": {"port": port},
        "prefill": {"kv_memory": "4MiB", "resources": {"read": 1}, "threads": 1},
        "decode": {"kv_memory": "4MiB", "resources": {"write": 0.5}, "threads": 1, "nice": 0},
        "router": {"port": 0, "http_port": 0, "metrics_port": 0},
    }
    workspace = tmp_path_factory.mktemp("detached")
    path = workspace / "baton.yaml"
    path.write_text(yaml.safe_dump(settings))
    flags = ["--config", str(path), "--ray-address", head.address, "--detach", "--name", "tiny"]
    with Serve(workspace, *flags, "--watch", environment=TOKEN) as command:
        command.wait_for("`baton stop baton-tiny --ray-address .*` stops it")
        yield Detached(command, flags, path, f"{host}:{port}")


def assert_answers(cluster: Serve) -> None:
    with cluster.client() as client:
        assert client.generate([1, 2, 3], max_tokens=5).usage.completion_tokens == 5


@pytest.mark.fleet
def test_two_clusters_share_a_ray_and_leave_it_running(
    head: RayHead, detached: Detached, tiny: Path, tmp_path: Path
) -> None:
    with serve(tmp_path, head, tiny) as second:
        second.ready().wait_whole()
        for cluster in (detached.command, second):
            assert_answers(cluster)
        second.send(signal.SIGTERM)
        assert (second.wait(), second.stderr) == (0, "")
    assert_answers(detached.command)
    assert len(head.actors()) == 4
    assert head.runs()


def test_a_router_outside_ray_follows_the_controller_at_its_port(
    detached: Detached, tmp_path: Path
) -> None:
    follow = [
        "-m",
        "baton.router",
        "--config",
        str(detached.config),
        "--controller",
        detached.controller,
    ]
    router = Command(tmp_path, [sys.executable, *follow])
    try:
        said = re.search(r"gRPC on (\S+),", router.wait_for("router ready"))
        assert said
        with Client(said[1]) as client:
            client.wait_ready(timeout=30.0)
            assert client.generate([1, 2, 3], max_tokens=5).usage.completion_tokens == 5
    finally:
        router.end()


def processes(detached: Detached) -> dict[str, int]:
    """What tells each worker's process from others."""
    with detached.command.client() as client:
        return {each.member.worker_id: each.incarnation for each in client.status().workers}


def test_a_command_that_was_killed_takes_its_cluster_over_when_it_is_started_again(
    detached: Detached, tmp_path: Path
) -> None:
    before = processes(detached)
    detached.command.send(signal.SIGKILL)
    detached.command.wait()
    with Serve(tmp_path, *detached.flags, "--watch", environment=TOKEN) as again:
        again.wait_for("baton-tiny is already running and keeps running")
        again.wait_for("stops it")
        assert again.address == detached.command.address
        with again.client() as client:
            assert client.generate([1, 2, 3], max_tokens=5).usage.completion_tokens == 5
        assert processes(detached) == before
        again.send(signal.SIGTERM)
        assert (again.wait(), again.stderr) == (0, "")
    assert "another one" not in again.stdout
    assert processes(detached) == before


def test_a_cluster_that_is_taken_over_keeps_its_configuration(
    detached: Detached, tmp_path: Path
) -> None:
    before = processes(detached)
    with Serve(tmp_path, *detached.flags, "--decode", "2", environment=TOKEN) as again:
        assert (again.wait(), again.stderr) == (0, "")
        assert "it keeps the configuration that it was started with" in again.stdout
    assert processes(detached) == before


def test_a_controllers_port_that_is_taken_is_told_in_one_line(
    head: RayHead, detached: Detached, tmp_path: Path
) -> None:
    flags = ["--config", str(detached.config), "--ray-address", head.address]
    with Serve(tmp_path, *flags, environment=TOKEN) as second:
        assert second.wait() == 1
    (line,) = second.stderr.splitlines()
    assert re.fullmatch(r"baton: cannot listen on \S+ \(controller.port\): Address .*", line)


def test_a_detached_cluster_serves_until_it_is_stopped(
    head: RayHead, detached: Detached, tmp_path: Path
) -> None:
    assert_answers(detached.command)
    stop = Command(tmp_path, [BATON, "stop", "--ray-address", head.address], TOKEN)
    assert (stop.wait(), stop.stderr) == (0, "")
    assert re.fullmatch(r"baton-\w+ is stopped\n", stop.stdout)
    head.wait_without_actors()


def test_a_cluster_whose_command_is_killed_leaves_a_shared_ray(
    head: RayHead, tiny: Path, tmp_path: Path
) -> None:
    with serve(tmp_path, head, tiny) as cluster:
        cluster.wait_for("importing torch")
        cluster.send(signal.SIGKILL)
        cluster.wait()
    head.wait_without_actors()
    assert head.runs()


def test_what_only_a_worker_can_find_is_told_in_one_line(
    head: RayHead, tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "weightless"
    model.mkdir()
    shutil.copy(tiny / "config.json", model)
    # One worker finds it; the other never has a process.
    config = tmp_path / "one.yaml"
    config.write_text(yaml.safe_dump({"decode": {"resources": {"elsewhere": 1}}}))
    flags = ["--config", str(config), "--ray-address", head.address, "--insecure"]
    with Serve(tmp_path, *flags, "--model", str(model), environment=TOKEN) as cluster:
        assert cluster.wait() == 1
    (line,) = cluster.stderr.splitlines()
    assert re.fullmatch(r"baton: prefill-0 cannot start: .*weightless.*", line)
    head.wait_without_actors()


@pytest.mark.fleet
def test_a_node_downloads_a_hubs_model_itself_and_reports_what_goes_wrong(
    head: RayHead, hub: TinyHub, node_home: Path, tmp_path: Path
) -> None:
    others = len(head.actors())
    save(TINY_MODELS["llama"], tmp_path / "model")
    commit = hub.push("org/tiny", tmp_path / "model")
    environment = hub.environment(tmp_path / "here") | TOKEN
    flags = ["--ray-address", head.address, "--insecure", "--model", "org/tiny"]
    weights = f"hub/models--org--tiny/snapshots/{commit}/model.safetensors"
    hub.cuts = 1000
    with Serve(tmp_path / "cut", *flags, environment=environment) as cut:
        assert cut.wait() == 1
    expected = r"baton: \S+-0 cannot start: the download of org/tiny was interrupted .*\n"
    assert re.fullmatch(expected, cut.stderr)
    head.wait_without_actors(others)
    hub.cuts = 0
    with Serve(tmp_path / "whole", *flags, "--kv-memory", "4MiB", environment=environment) as whole:
        assert_answers(whole.ready())
        assert (node_home / weights).is_file()
        assert not (tmp_path / "here" / weights).exists()
        whole.send(signal.SIGINT)
        assert (whole.wait(), whole.stderr) == (0, "")
    head.wait_without_actors(others)


def test_an_address_where_nobody_answers_is_told_in_one_line(tmp_path: Path) -> None:
    ended = run(tmp_path, "--ray-address", "127.0.0.1:1", *FREE_PORTS)
    assert ended.wait() == 1
    (line,) = ended.stderr.splitlines()
    assert line == "baton: no Ray cluster answers at 127.0.0.1:1: Connection refused"


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "host:", ":6379"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidConfig, match="must be HOST:PORT or auto"):
        check_ray(address)


def test_a_ray_that_asks_for_a_token_is_told_in_one_line(head: RayHead, tmp_path: Path) -> None:
    ended = run(tmp_path, "--ray-address", head.address, *FREE_PORTS)
    assert ended.wait() == 1
    (line,) = ended.stderr.splitlines()
    assert "set RAY_AUTH_MODE=token" in line
    wrong = TOKEN | {"RAY_AUTH_TOKEN": "f" * 64}
    stop = Command(tmp_path, [BATON, "stop", "--ray-address", head.address], wrong)
    assert stop.wait() == 1
    (line,) = stop.stderr.splitlines()
    assert f"the Ray at {head.address} refuses the token" in line

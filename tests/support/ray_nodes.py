"""A Ray of several nodes on this machine, and a Redis behind its head.

Every node is what one `ray start` starts, in its own session: a node dies when its whole session
is killed at once. Each has its own loopback address.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.util import get_node_ip_address
from serving import Command, listening_ports

from baton.cluster.ports import free_port
from baton.v1.cluster_pb2 import StatusResponse

Kept = TypeVar("Kept", bound=Command)

HEAD = "127.0.0.1"
RAY = str(Path(sys.executable).with_name("ray"))
# As a user would set it; otherwise one token file serves all of a user's clusters.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
OPTIONS = ["--num-cpus=1", "--object-store-memory=83886080"]
OPTIONS += ["--disable-usage-stats", "--dashboard-agent-listen-port=0"]
# Of a head whose autoscaler adds nodes that are processes here: the autoscaler that `ray up` and
# KubeRay start by themselves.
AUTOSCALED = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
START_SECONDS = 60.0
STARTS = 3


class Node(Command):
    """The processes of one `ray start`; the command itself has ended."""

    def __init__(
        self, workspace: Path, host: str, options: list[str], environment: dict[str, str]
    ) -> None:
        self.host = host
        start = [RAY, "start", f"--node-ip-address={host}", *OPTIONS]
        super().__init__(workspace, [*start, *options], environment)

    def wait_started(self) -> Node:
        assert self._popen.wait(START_SECONDS) == 0, self.stdout + self.stderr
        return self

    def find(self, title: str) -> int:
        """The one process whose command line has `title`."""
        (pid,) = [pid for pid, line in self.processes().items() if title in line]
        return pid

    def listener(self, port: int) -> int:
        """The process that listens on a port."""
        (pid,) = [pid for pid in self.processes() if port in listening_ports(pid)]
        return pid

    def workers(self, status: StatusResponse) -> set[str]:
        """The names of the workers here."""
        members = [worker.member for worker in status.workers]
        return {each.worker_id for each in members if each.address.startswith(f"{self.host}:")}


class Redis(Command):
    def __init__(self, workspace: Path) -> None:
        self.port = free_port(HEAD)
        program = shutil.which("redis-server")
        assert program, "there is no redis-server"
        options = ["--port", str(self.port), "--bind", HEAD, "--dir", str(workspace)]
        super().__init__(workspace, [program, *options, "--save", "", "--appendonly", "no"])
        self.wait_for("Ready to accept connections")


def why_no_redis() -> str:
    """Why there is no Redis; empty when there is."""
    if shutil.which("redis-server"):
        return ""
    return "needs redis-server (apt-get install redis-server)"


class RayNodes:
    """A head and any number of other nodes, by name."""

    def __init__(self, *, redis: bool = False, most_nodes: int = 0) -> None:
        """Ray's autoscaler adds up to `most_nodes` nodes with a slot each on demand."""
        # Not pytest's folder: Ray has sockets there, whose paths must be short.
        self._workspace = Path(tempfile.mkdtemp(prefix="ray-"))
        self._wants_redis = redis
        self._most_nodes = most_nodes
        self._commands: list[Command] = []
        self._environment = dict(TOKEN)
        self.nodes: dict[str, Node] = {}
        self._gcs_again: Command | None = None
        self._hosts = itertools.count(2)
        self.port = free_port(HEAD)
        self.address = f"{HEAD}:{self.port}"

    def __enter__(self) -> RayNodes:
        try:
            if self._wants_redis:
                redis = self._keep(Redis(self._workspace / "redis"))
                self._environment["RAY_REDIS_ADDRESS"] = f"{HEAD}:{redis.port}"
            self.start_head()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start_head(self) -> None:
        """Starts the head at its address, also again after its death."""
        # Ray would take other nodes of ours on this machine for a head.
        (self._workspace / "ray_current_cluster").unlink(missing_ok=True)
        options = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        options.append(f"--temp-dir={self._workspace}")
        if self._most_nodes:
            options.append(f"--autoscaling-config={self._autoscaling()}")
            self._environment |= AUTOSCALED
        self._add("head", HEAD, options)

    def add(self, name: str, slots: int) -> Node:
        """A node with capacity for `slots` workers: a GPU to Ray, a CPU in our configuration."""
        host = f"127.0.0.{next(self._hosts)}"
        return self._add(name, host, [f"--address={self.address}", f"--num-gpus={slots}"])

    def _autoscaling(self) -> Path:
        """The autoscaler's file. Its nodes are processes of the head's session."""
        gcs = f"{get_node_ip_address()}:{self.port}"
        node = {"CPU": 1, "GPU": 1, "object_store_memory": 83886080}
        commands = ["initialization", "setup", "head_setup", "worker_setup"]
        commands += ["head_start_ray", "worker_start_ray"]
        tree: dict[str, object] = {
            "cluster_name": "fake",
            # No login is needed to set up or check a node here.
            "provider": {
                "type": "external",
                "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
                "gcs_address": gcs,
                "launch_multiple": True,  # else it starts one at a time
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": {
                FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
                "node": {"resources": node, "node_config": {}, "max_workers": self._most_nodes},
            },
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            "max_workers": self._most_nodes,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 0.1,
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            "cluster_synced_files": [],
            **{f"{name}_commands": [] for name in commands},
        }
        path = self._workspace / "autoscaling.json"
        path.write_text(json.dumps(tree))
        return path

    def added(self) -> int:
        """Nodes that the autoscaler has added and not removed."""
        lines = self.nodes["head"].processes().values()
        return sum("raylet/raylet " in line for line in lines) - 1

    def kill(self, name: str) -> None:
        """Kills all processes at once, as a power loss does."""
        self._end(self.nodes.pop(name))
        if name == "head" and self._gcs_again is not None:
            self._end(self._gcs_again)
            self._gcs_again = None

    def kill_gcs(self) -> None:
        """Kills Ray's directory and store; everything else on the head lives on."""
        pid = self.nodes["head"].find("gcs_server")
        self._gcs = _read(pid, "cmdline")
        self._gcs_environment = dict(item.split("=", 1) for item in _read(pid, "environ"))
        os.kill(pid, signal.SIGKILL)

    def restart_gcs(self) -> None:
        """Starts it again with the same command."""
        command = Command(self._workspace / "gcs", self._gcs, self._gcs_environment)
        self._gcs_again = self._keep(command)
        _wait_listening(self.port)

    def end(self) -> None:
        for command in reversed(self._commands):
            command.end()
        shutil.rmtree(self._workspace, ignore_errors=True)

    def _add(self, name: str, host: str, options: list[str]) -> Node:
        """Retries as a supervisor would: Ray gives up when its node has not registered within
        30 s."""
        for _ in range(STARTS - 1):
            with contextlib.suppress(AssertionError):
                return self._start(name, host, options)
            self.kill(name)
        return self._start(name, host, options)

    def _start(self, name: str, host: str, options: list[str]) -> Node:
        node = Node(self._workspace / f"start-{name}", host, options, self._environment)
        self.nodes[name] = self._keep(node)
        return node.wait_started()

    def _end(self, command: Command) -> None:
        self._commands.remove(command)
        command.end()

    def _keep(self, command: Kept) -> Kept:
        self._commands.append(command)
        return command


def _read(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().rstrip("\0").split("\0")


def _wait_listening(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((HEAD, port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens on {port}"
            time.sleep(0.05)

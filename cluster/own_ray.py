"""Starts a Ray without the processes and ports that a cluster on one machine does not use.

ray.init has no options for that, so parts of Ray are replaced while it starts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray._raylet
from ray._private import node, parameter, ray_constants, services

_IDLE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("idle_agent.py"))]
# The ports that agents would tell their node, which waits for them.
_AGENT_PORTS = (
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "RUNTIME_ENV_AGENT_PORT_NAME",
)
_NO_PORT = -1
_raylet: Any = ray._raylet


class _FewProcesses(parameter.RayParams):  # type: ignore[misc]
    """A head without the processes that scale nodes and collect logs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.no_monitor, self.include_log_monitor = True, False


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces the start of the dashboard's server, which Ray would wait for."""


_start_process = services.start_ray_process


def _start_without_agents(command: list[str], *arguments: Any, **options: Any) -> Any:
    """A node demands an agent for the dashboard and one for runtime environments, and waits for
    their ports: some 2 s of CPU time."""
    values = dict(each.split("=", 1) for each in command if each.startswith("--") and "=" in each)
    agents = [name for name in values if name.endswith("_agent_command")]
    if agents:
        for port in _AGENT_PORTS:
            name = getattr(_raylet, port)
            _raylet.persist_port(values["--session_dir"], values["--node_id"], name, _NO_PORT)
        idle = subprocess.list2cmdline(_IDLE)
        kept = [each for each in command if each.partition("=")[0] not in agents]
        command = [*kept, *(f"{name}={idle}" for name in agents)]
    return _start_process(command, *arguments, **options)


_OURS: tuple[tuple[Any, str, Any], ...] = (
    # So it listens on loopback alone, as it does by default on systems where it forms no clusters.
    (ray_constants, "ENABLE_RAY_CLUSTER", False),
    (parameter, "RayParams", _FewProcesses),
    (node.Node, "start_api_server", _nothing),
    (services, "start_ray_process", _start_without_agents),
)


@contextlib.contextmanager
def few_processes() -> Iterator[None]:
    """A Ray that starts within listens on loopback alone. This process reads the environment when
    it imports Ray, and Ray's own do."""
    clusters = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(clusters)
    theirs = [getattr(owner, name) for owner, name, _ in _OURS]
    os.environ[clusters] = "0"
    for owner, name, ours in _OURS:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(_OURS, theirs, strict=True):
            setattr(owner, name, value)
        os.environ.pop(clusters)
        if before is not None:
            os.environ[clusters] = before

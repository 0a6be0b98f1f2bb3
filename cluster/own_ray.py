"""Starts Ray without the processes and ports that a cluster on one machine does not use.

ray.init has no options for this, so parts of Ray are patched while it starts.
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

_IDLE_AGENT = [sys.executable, "-I", "-S", str(Path(__file__).with_name("idle_agent.py"))]
# Ports that agents report to their node, which waits for them.
_AGENT_PORTS = (
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "RUNTIME_ENV_AGENT_PORT_NAME",
)
_NO_PORT = -1
_raylet: Any = ray._raylet


class _FewProcesses(parameter.RayParams):  # type: ignore[misc]
    """Parameters of a head without autoscaler and log collector."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.no_monitor, self.include_log_monitor = True, False


class _OwnGroup(services.ConsolePopen):  # type: ignore[misc]
    """A process that signals to our group do not reach: it would end before our command could
    stop the cluster."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, process_group=0, **options)


def _skip_api_server(*_: Any, **__: Any) -> None:
    """Replaces the start of the dashboard's server, which Ray would wait for."""


_start_process = services.start_ray_process


def _start_without_agents(command: list[str], *arguments: Any, **options: Any) -> Any:
    """Replaces a node's agents by idle ones.

    A node needs an agent for the dashboard and one for runtime environments, and waits for their
    ports. The real ones take about 2 s of CPU time to start.
    """
    values = dict(each.split("=", 1) for each in command if each.startswith("--") and "=" in each)
    agents = [name for name in values if name.endswith("_agent_command")]
    if agents:
        for port in _AGENT_PORTS:
            name = getattr(_raylet, port)
            _raylet.persist_port(values["--session_dir"], values["--node_id"], name, _NO_PORT)
        idle = subprocess.list2cmdline(_IDLE_AGENT)
        kept = [each for each in command if each.partition("=")[0] not in agents]
        command = [*kept, *(f"{name}={idle}" for name in agents)]
    return _start_process(command, *arguments, **options)


_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    # Without multi-node support, Ray listens on loopback alone.
    (ray_constants, "ENABLE_RAY_CLUSTER", False),
    (parameter, "RayParams", _FewProcesses),
    (node.Node, "start_api_server", _skip_api_server),
    (services, "start_ray_process", _start_without_agents),
    (services, "ConsolePopen", _OwnGroup),
)


@contextlib.contextmanager
def few_processes() -> Iterator[None]:
    """Patches Ray for starts within this context."""
    # This process read the variable when it imported Ray; Ray's processes read it from here.
    variable = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(variable)
    originals = [getattr(owner, name) for owner, name, _ in _PATCHES]
    os.environ[variable] = "0"
    for owner, name, patch in _PATCHES:
        setattr(owner, name, patch)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(_PATCHES, originals, strict=True):
            setattr(owner, name, original)
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before

"""Starts Ray without the processes and ports that a cluster on one machine does not use, and ends
what is left of it when its own end fails.

ray.init has no options for this, so parts of Ray are patched while it starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
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
_MARK = f"BATON_RAY_OF={os.getpid()}-{time.monotonic_ns()}"
"""In the environment of each process that Ray starts, and of their children."""
_GONE_SECONDS = 5.0
"""For the kernel to end killed processes."""
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
_started: list[Any] = []  # Ray's ProcessInfo of its head and its node


def _start_without_agents(command: list[str], *arguments: Any, **options: Any) -> Any:
    """Replaces a node's agents by idle ones, and remembers the process.

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
    started = _start_process(command, *arguments, **options)
    _started.append(started)
    return started


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
    mark, _, value = _MARK.partition("=")
    os.environ[variable], os.environ[mark] = "0", value
    _started.clear()
    for owner, name, patch in _PATCHES:
        setattr(owner, name, patch)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(_PATCHES, originals, strict=True):
            setattr(owner, name, original)
        del os.environ[variable], os.environ[mark]
        if before is not None:
            os.environ[variable] = before


def has_ended() -> bool:
    """True if Ray's head or node was started here and has ended."""
    return any(each.process.poll() is not None for each in _started)


def kill_all() -> None:
    """Kills every process of the Ray started here. An orderly end of Ray leaves none."""
    deadline = time.monotonic() + _GONE_SECONDS
    # Again and again: a process may have started another one before it ended.
    while (left := _marked()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked() -> list[int]:
    pids = (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(pid) for pid in pids if _MARK.encode() in _environment(pid)]


def _environment(pid: str) -> list[bytes]:
    """Returns nothing of a process that has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []

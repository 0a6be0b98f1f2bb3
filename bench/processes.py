"""Starts Baton's processes for benchmarks, without Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton import Client
from baton.core import config as configs
from baton.v1 import cluster_pb2, worker_pb2

START_SECONDS = 240.0
STOP_SECONDS = 30.0

FREE_ROUTER = {"port": 0, "http_port": 0, "metrics_port": 0, "canary_seconds": 0}
"""Router settings: any free ports, and no canaries."""


@dataclass(frozen=True, slots=True)
class Process:
    """A ready process and its addresses."""

    pid: int
    address: str
    metrics: str = ""  # empty for a worker without `metrics`
    http: str = ""  # empty for a worker

    @property
    def memory(self) -> int:
        """Resident bytes now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def processor_seconds(self) -> float:
        """CPU time of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def workers(
    folder: Path,
    tree: Mapping[str, object],
    names: Collection[str],
    variables: Mapping[str, str] | None = None,
    *,
    metrics: bool = False,
) -> Iterator[dict[str, Process]]:
    """Starts workers with names such as "prefill-0", and stops them at the end of the block.

    `variables` are added to their environment. With `metrics` they serve metrics.
    """
    config = _write(folder / "workers.yaml", tree)
    with contextlib.ExitStack() as running:
        started = {}
        for name in names:
            module = f"baton.{name.partition('-')[0]}_worker"
            arguments = [module, "--config", config, "--name", name]
            arguments += ["--metrics-port", "0"] if metrics else []
            log = folder / f"{name}.log"
            started[name] = running.enter_context(_start(log, arguments, variables or {})), log
        yield {name: _ready(popen, log) for name, (popen, log) in started.items()}


@contextlib.contextmanager
def router(
    folder: Path, tree: Mapping[str, object], members: Collection[Process], name: str = "router"
) -> Iterator[Process]:
    """Starts a router of these workers. Yields it once every prefill worker is connected to every
    decode worker."""
    addresses = [member.address for member in members]
    settings = {**tree, "members": {"workers": addresses}}
    config = _write(folder / f"{name}.yaml", settings)
    log = folder / f"{name}.log"
    with _start(log, ["baton.router", "--config", config], {}) as popen:
        ready = _ready(popen, log)
        with Client(ready.address) as client:
            _wait_whole(client, len(addresses))
        yield ready


def _write(path: Path, tree: Mapping[str, object]) -> str:
    # Reports an unknown key here, instead of in the log of a process that failed to start.
    configs.parse(tree)
    path.write_text(yaml.safe_dump(dict(tree)))
    return str(path)


@contextlib.contextmanager
def _start(
    log: Path, arguments: list[str], variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        )
    try:
        yield popen
    finally:
        popen.send_signal(signal.SIGINT)
        popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(STOP_SECONDS)
        popen.kill()


def _ready(popen: subprocess.Popen[bytes], log: Path) -> Process:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and popen.poll() is None:
        text = log.read_text()
        if match := re.search(r"ready(?:: gRPC)? on (\S+:\d+)", text):
            metrics = re.search(r"metrics on (\S+)", text)
            http = re.search(r"HTTP on (\S+),", text)
            return Process(
                popen.pid, match[1], metrics[1] if metrics else "", http[1] if http else ""
            )
        time.sleep(0.1)
    raise SystemExit(f"{log.stem} did not start:\n{log.read_text()[-3000:]}")


def _wait_whole(client: Client, count: int) -> None:
    client.wait_ready(START_SECONDS)
    deadline = time.monotonic() + START_SECONDS
    while not _is_whole(client.status().workers, count):
        if time.monotonic() > deadline:
            raise SystemExit(f"not all workers are connected:\n{client.status()}")
        time.sleep(0.2)


def _is_whole(members: Collection[cluster_pb2.WorkerStatus], count: int) -> bool:
    attached = [each for each in members if each.attached]
    prefill = [each for each in attached if each.member.role == worker_pb2.ROLE_PREFILL]
    decode = count - len(prefill)
    return len(attached) == count and all(len(each.connected) == decode for each in prefill)

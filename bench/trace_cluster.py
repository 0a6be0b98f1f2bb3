"""Clusters to replay a trace against, started without Ray.

A worker stands for a machine, so each has threads of its own and no more: what one
computes must not slow another.
"""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton import Client
from baton.core import config as configs
from baton.core import metrics
from baton.core.types import Role
from baton.v1 import worker_pb2
from bench.processes import FREE_ROUTER, address_in, process

READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The workers of a cluster."""

    model: str
    prefill: int
    decode: int
    threads: int
    kv_memory: str
    page_size: int

    def tree(self) -> dict[str, object]:
        pool = {"threads": self.threads, "kv_memory": self.kv_memory}
        return {
            "model": self.model,
            "page_size": self.page_size,
            "prefill": pool,
            "decode": pool,
            "log_level": "warning",
        }


@dataclass(frozen=True, slots=True)
class Door:
    """A router's addresses."""

    address: str
    # Empty when it is not known.
    metrics: str = ""

    def decode_cached_tokens(self) -> int | None:
        """Prompt tokens not transferred since the start, since decode had them cached."""
        if not self.metrics:
            return None
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as response:
            text = response.read().decode()
        series = f'{metrics.CACHED_TOKENS}{{where="decode"}} '
        return sum(
            int(float(line.removeprefix(series)))
            for line in text.splitlines()
            if line.startswith(series)
        )


@contextlib.contextmanager
def workers(shape: Shape, folder: Path) -> Iterator[list[str]]:
    """Starts workers; yields their addresses."""
    config = _write(folder / "workers.yaml", shape.tree())
    names = [f"{Role.PREFILL}-{index}" for index in range(shape.prefill)]
    names += [f"{Role.DECODE}-{index}" for index in range(shape.decode)]
    with contextlib.ExitStack() as running:
        logs = [
            running.enter_context(
                process(folder, name, _module(name), "--config", config, "--name", name)
            )
            for name in names
        ]
        yield [address_in(log) for log in logs]


@contextlib.contextmanager
def router(
    shape: Shape, folder: Path, name: str, members: list[str], settings: Mapping[str, object]
) -> Iterator[Door]:
    """A router of these workers, once every prefill worker reaches every decode worker.

    `settings` are those of the configuration's section."""
    tree = {**shape.tree(), "router": {**FREE_ROUTER, **settings}, "members": {"workers": members}}
    config = _write(folder / f"{name}.yaml", tree)
    with process(folder, name, "baton.router", "--config", config) as log:
        address = address_in(log)
        with Client(address) as client:
            _wait_whole(client, shape)
        yield Door(address, re.findall(r"metrics on (\S+)", log.read_text())[0])


def _module(name: str) -> str:
    return f"baton.{name.partition('-')[0]}_worker"


def _write(path: Path, tree: Mapping[str, object]) -> str:
    # An unknown key is better reported here than in the log of an ended process.
    configs.parse(tree)
    path.write_text(yaml.safe_dump(dict(tree)))
    return str(path)


def _wait_whole(client: Client, shape: Shape) -> None:
    client.wait_ready(READY_SECONDS)
    deadline = time.monotonic() + READY_SECONDS
    while not _is_whole(client, shape):
        if time.monotonic() > deadline:
            raise SystemExit(f"not all workers are connected:\n{client.status()}")
        time.sleep(0.2)


def _is_whole(client: Client, shape: Shape) -> bool:
    members = [worker for worker in client.status().workers if worker.attached]
    prefill = [worker for worker in members if worker.member.role == worker_pb2.ROLE_PREFILL]
    return len(members) == shape.prefill + shape.decode and all(
        len(worker.connected) == shape.decode for worker in prefill
    )

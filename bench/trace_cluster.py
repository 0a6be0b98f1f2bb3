"""Clusters to replay a trace against, started without Ray.

A worker stands for a machine, so each has its own threads and no more: workers must not
slow each other down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.core import metrics
from baton.core.types import Role
from bench import processes
from bench.counters import total
from bench.processes import FREE_ROUTER, Process


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
    metrics: str = ""  # empty if unknown

    def decode_cached_tokens(self) -> int | None:
        """Prompt tokens since the start that were not transferred because decode had them."""
        if not self.metrics:
            return None
        return int(total(self.metrics, metrics.CACHED_TOKENS, where="decode"))


@contextlib.contextmanager
def workers(shape: Shape, folder: Path) -> Iterator[list[Process]]:
    names = [f"{Role.PREFILL}-{index}" for index in range(shape.prefill)]
    names += [f"{Role.DECODE}-{index}" for index in range(shape.decode)]
    with processes.workers(folder, shape.tree(), names) as started:
        yield list(started.values())


@contextlib.contextmanager
def router(
    shape: Shape, folder: Path, name: str, members: list[Process], settings: Mapping[str, object]
) -> Iterator[Door]:
    """Starts a router of these workers. `settings` are keys of the `router` section."""
    tree = {**shape.tree(), "router": {**FREE_ROUTER, **settings}}
    with processes.router(folder, tree, members, name) as started:
        yield Door(started.address, started.metrics)

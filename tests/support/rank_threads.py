"""An engine whose ranks are threads: real weight shares and sums, with a quick start."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from baton.engine.architecture import Split
from baton.engine.engine import Engine
from baton.engine.tensor_parallel import Group

KV_MEMORY = 4 << 20


@dataclass(frozen=True)
class SplitEngine:
    """`engine` is rank 0; `others` follow it."""

    engine: Engine
    others: list[Engine]


def groups(size: int, folder: Path) -> tuple[list[Group], list[Connection]]:
    """The group as seen by each rank, and the connections on which ranks 1 and up receive steps."""
    pipes = [Pipe() for _ in range(1, size)]
    rendezvous = folder / "meeting"
    first = Group(Split(0, size), rendezvous, [here for here, _ in pipes])
    others = [Group(Split(rank, size), rendezvous) for rank in range(1, size)]
    return [first, *others], [there for _, there in pipes]


@contextlib.contextmanager
def split_engine(
    model: Path, size: int, workspace: Path, page_size: int = 16, **options: str
) -> Iterator[SplitEngine]:
    """The model in `model`, split over `size` ranks."""
    made, steps = groups(size, workspace)

    def load(group: Group) -> Engine:
        return Engine.load(model, page_size=page_size, kv_memory=KV_MEMORY, group=group, **options)

    with ThreadPoolExecutor(size) as pool:
        engines = list(pool.map(load, made))
    threads = [
        threading.Thread(target=_follow, args=(engine, heard))
        for engine, heard in zip(engines[1:], steps, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield SplitEngine(engines[0], engines[1:])
    finally:
        made[0].close()
        for thread in threads:
            thread.join()


def _follow(engine: Engine, steps: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            engine.follow(steps.recv_bytes())

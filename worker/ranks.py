"""The other processes of a worker that several share: ranks 1 and up. Rank 0 is the worker.

    start ─▶ each loads its part ─▶ meet ─▶ follow steps and transfers ─▶ close
                  └────────────────────────┴─ one ends ─▶ `on_lost`: the worker cannot go on

Two sockets lead to each of them, one for steps and one for transfers. They end when rank 0 does,
however it ends, and so do the processes behind them (worker/rank.py).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from core import model_store
from core.config import Config
from core.errors import WorkerLost
from core.types import Role
from engine.architecture import read_architecture
from engine.group import Group
from kv_transfer.shard_proxy import ShardProxy
from worker.cpu import claim_threads
from worker.rank_settings import LOADED, RankSettings, check_ranks, decode_error

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


def start_ranks(
    config: Config, role: Role, device: str, dtype: str, on_lost: Callable[[WorkerLost], None]
) -> Ranks | None:
    """The other ranks of a worker; None where it has none. `config` is settled.

    Raises InvalidConfig where they could not share its model.
    """
    section = config.pool(role)
    folder = model_store.locate(config.model)
    check_ranks(section.tensor_parallel, read_architecture(folder), device, config.cache)
    if section.tensor_parallel == 1:
        return None
    settings = RankSettings(
        rank=0,
        size=section.tensor_parallel,
        meeting_point="",
        folder=str(folder),
        dtype=dtype,
        device=device,
        page_size=config.page_size,
        kv_memory=section.kv_memory,
        threads=claim_threads(config, role),
        nice=config.decode.nice if role is Role.DECODE else 0,
        random_weights=config.weights == "random",
        transport=config.transport,
        log_level=config.log_level,
    )
    return Ranks(settings, on_lost)


class Ranks:
    """Starts `settings.size` - 1 processes, which load while the caller loads rank 0's part.

    `on_lost` is called, on any thread, when one of them ends by itself.
    """

    def __init__(self, settings: RankSettings, on_lost: Callable[[WorkerLost], None]) -> None:
        self._on_lost = on_lost
        self._closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._steps: list[Connection] = []
        self.shards: list[ShardProxy] = []  # the pages of ranks 1, 2, …
        meeting_point = Path(self._folder.name) / "meeting"
        settings = dataclasses.replace(settings, meeting_point=str(meeting_point))
        for rank in range(1, settings.size):
            self._start(dataclasses.replace(settings, rank=rank))
        self.group = Group(settings.split, meeting_point, self._steps)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1, 2, …"""
        return [process.pid for process in self._processes]

    def meet(self) -> None:
        """Returns when all have loaded and are connected; raises why one cannot be."""
        for rank, steps in enumerate(self._steps, start=1):
            try:
                answer = steps.recv_bytes()
            except (EOFError, ConnectionError):
                raise WorkerLost(f"rank {rank} ended while it loaded") from None
            if answer != LOADED:
                raise decode_error(answer)
        self.group.meet()
        self._folder.cleanup()

    def close(self) -> None:
        """Has the processes end, and waits for them."""
        self._closing = True
        self.group.close()
        for shard in self.shards:
            shard.close()
        for process in self._processes:
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, settings: RankSettings) -> None:
        steps, their_steps = socket.socketpair()
        transfers, their_transfers = socket.socketpair()
        inherited = (their_steps.fileno(), their_transfers.fileno())
        with their_steps, their_transfers:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker.rank", *map(str, inherited)],
                pass_fds=inherited,
                # Wherever this process found our packages, as under Ray.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._processes.append(process)
        self._steps.append(Connection(steps.detach()))
        self.shards.append(ShardProxy(transfers))
        self._steps[-1].send_bytes(settings.encode())
        name = f"rank-{settings.rank}"
        threading.Thread(target=self._watch, args=(name, process), name=name, daemon=True).start()

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            error = WorkerLost(f"{name} of this worker has ended ({code})")
            log.error("%s", error)
            self._on_lost(error)

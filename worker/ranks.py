"""Ranks 1 and up: the other processes of a worker whose model is split. Rank 0 is the worker.

    start ─▶ each loads its part ─▶ all connect ─▶ follow steps and transfers ─▶ close
                  └────────────────────────────────┴─ one ends ─▶ `on_lost`: the worker ends too

Each rank takes one of the GPUs that the worker sees, in order. Ranks share a GPU only if the
configuration allows it, for tests.

Rank 0 has three sockets to each rank: for steps, for transfers, and for copies to and from
the second tier. They close when rank 0 ends, and the ranks end with them
(worker/rank_process.py).

The end of a rank shows in several places: its exit status, a failed step, a failed transfer.
`Ranks` alone decides on the cause: other code asks `lost` before it reports its own error.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from baton.core.config import Config
from baton.core.errors import WorkerLost
from baton.core.types import Role
from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings
from baton.engine.model_choice import read_model
from baton.engine.page_memory import PageMemory, share_rows
from baton.engine.tensor_parallel import Group, NcclGroup
from baton.kv_transfer.shard_process import ShardProxy
from baton.worker.rank_process import RankSettings, check_ranks, rank_devices
from baton.worker.resources import claim_threads

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
# Limit between the first failure that a lost rank causes and its exit status.
EXIT_SECONDS = 2.0
# Time for the worker to end by itself after the loss of a rank.
LOST_SECONDS = 5.0


def rank_settings(
    config: Config, folder: Path, role: Role, device: str, dtype: str, gpu: GpuSettings
) -> tuple[RankSettings, list[str]]:
    """Returns rank 0's settings and the device of each rank, for the model in `folder`. `config`
    is settled.

    Raises InvalidConfig if the model cannot be split over the ranks.
    """
    section = config.pool(role)
    size = section.tensor_parallel
    devices = [device]
    if size > 1:
        check_ranks(size, read_model(folder, config.engine, config.max_context), gpu.share)
        visible = torch.cuda.device_count()
        devices = rank_devices(size, device, visible, may_share=config.ranks_share_gpus)
    most = max(Counter(devices).values())
    threads = claim_threads(config, role)
    load = partial(
        Engine.load,
        folder,
        dtype=dtype,
        page_size=config.page_size,
        kv_memory=section.kv_memory,
        max_context=config.max_context,
        threads=threads,
        random_weights=config.weights == "random",
        engine=config.engine,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        gpu=dataclasses.replace(gpu, memory_share=gpu.memory_share / most),
    )
    settings = RankSettings(
        rank=0,
        size=size,
        device=devices[0],
        own_devices=device == "cuda" and most == 1,
        threads=threads,
        nice=config.decode.nice if role is Role.DECODE else 0,
        transport=config.transport,
        log_level=config.log_level,
        load=load,
    )
    return settings, devices


def has_second_tier(config: Config) -> bool:
    return config.prefix_cache and bool(config.cache.host_memory or config.cache.files)


class RankKilled(WorkerLost):
    """A rank was killed from outside. Like a killed worker, this accuses no request."""


class Ranks:
    """Starts `settings.size` - 1 processes, which load while the caller loads rank 0's part.

    `settings` are rank 0's; `devices` has one for each rank. `on_lost` is called, on any thread,
    when a rank ends before `close`.
    """

    def __init__(
        self,
        settings: RankSettings,
        devices: Sequence[str],
        on_lost: Callable[[WorkerLost], object],
        *,
        second_tier: bool = False,
    ) -> None:
        self._on_lost = on_lost
        self._closing = False
        self._lost: Future[WorkerLost] = Future()  # resolves when the first rank ends
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._steps: list[Connection] = []
        self._copies: list[Connection] = []
        self.shards: list[ShardProxy] = []  # the pages of ranks 1, 2, …
        rendezvous = Path(self._folder.name) / "rendezvous"
        self.settings = dataclasses.replace(
            settings,
            rendezvous=str(rendezvous),
            rows_file=os.memfd_create("baton-rows") if second_tier else None,
        )
        for rank, device in enumerate(devices[1:], start=1):
            self._start(dataclasses.replace(self.settings, rank=rank, device=device))
        make_group = NcclGroup if settings.own_devices else Group
        self.group = make_group(settings.split, rendezvous, self._steps, loaded=self._wait_loaded)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2, …"""
        return [process.pid for process in self._processes]

    def _wait_loaded(self) -> None:
        """Returns when all ranks have loaded; raises the error of one that cannot."""
        for rank, steps in enumerate(self._steps, start=1):
            try:
                error = steps.recv()
            except (EOFError, ConnectionError):
                unknown = WorkerLost(f"rank-{rank} of this worker has closed its socket")
                raise self.lost(EXIT_SECONDS) or unknown from None
            if error is not None:
                raise error

    def lost(self, seconds: float = 0.0) -> WorkerLost | None:
        """Waits up to `seconds` for a rank to end. Returns the loss of the first one, or None."""
        with suppress(TimeoutError):
            return self._lost.result(seconds)
        return None

    def remove_rendezvous(self) -> None:
        """Removes the rendezvous file after all ranks have connected, unless NCCL still needs
        it."""
        if not self.settings.own_devices:
            self._folder.cleanup()

    def page_memory(self, kv: Tensor, rows: int) -> PageMemory:
        """Allocates `rows` whole pages for the second tier. May be called once. `kv` is rank 0's
        pool."""
        file = self.settings.rows_file
        assert file is not None
        return share_rows(kv, self.settings.split, rows, file, self._copies)

    def close(self) -> None:
        """Ends the processes and waits for them."""
        self._closing = True
        self.group.close()
        for shard in self.shards:
            shard.close()
        for process in self._processes:
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._folder.cleanup()

    def _start(self, settings: RankSettings) -> None:
        steps, their_steps = socket.socketpair()
        transfers, their_transfers = socket.socketpair()
        copies, their_copies = socket.socketpair()
        inherited = [their_steps.fileno(), their_transfers.fileno(), their_copies.fileno()]
        files = [] if settings.rows_file is None else [settings.rows_file]
        with their_steps, their_transfers, their_copies:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton.worker.rank_process", *map(str, inherited)],
                pass_fds=inherited + files,
                # Ray may have extended this process's sys.path.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._processes.append(process)
        self._steps.append(Connection(steps.detach()))
        self._copies.append(Connection(copies.detach()))
        self.shards.append(ShardProxy(Connection(transfers.detach())))
        self._steps[-1].send(settings)
        name = f"rank-{settings.rank}"
        threading.Thread(target=self._watch, args=(name, process), name=name, daemon=True).start()

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing:
            return
        kind = RankKilled if code == -signal.SIGKILL else WorkerLost
        error = kind(f"{name} of this worker has ended ({code})")
        with suppress(InvalidStateError):  # another rank ended first
            self._lost.set_result(error)
            log.error("%s", error)
            self._on_lost(error)
        if self.settings.own_devices:
            # NCCL would wait for a lost rank's part forever, and so would this process.
            time.sleep(LOST_SECONDS)
            os._exit(1)

"""A model on two ranks: rank 0 here, a worker's real rank 1 in another process."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path

import torch
from engine_loop import KV_MEMORY

from baton.core.errors import WorkerLost
from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings
from baton.worker.rank_process import RankSettings
from baton.worker.ranks import Ranks


class Leader:
    """Rank 0. On a GPU both ranks share the device."""

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        dtype: str = "float32",
        kv_memory: int = KV_MEMORY,
        *,
        random_weights: bool = False,
        gpu: GpuSettings | None = None,
        second_tier: bool = False,
    ) -> None:
        self.lost: queue.SimpleQueue[WorkerLost] = queue.SimpleQueue()
        load = partial(
            Engine.load,
            folder,
            dtype=dtype,
            kv_memory=kv_memory,
            threads=1,
            random_weights=random_weights,
            gpu=gpu or GpuSettings(),
        )
        settings = RankSettings(
            rank=0,
            size=2,
            device=device,
            own_devices=False,
            threads=1,
            nice=0,
            transport="auto",
            log_level="info",
            load=load,
        )
        devices = [device, device]
        self.ranks = Ranks(settings, devices, self.lost.put, second_tier=second_tier)

    def load(self) -> Engine:
        settings = self.ranks.settings
        return settings.load(device=settings.device, threads=None, group=self.ranks.group)

    def check_rows(self, engine: Engine) -> None:
        """Saves a page to a second-tier row from both ranks, and restores another from it."""
        memory = self.ranks.page_memory(engine.kv, 4)
        memory.copy([(0, 3), (1, 1)])
        own = engine.kv[0].cpu().view(torch.uint8).numpy().tobytes()
        row = memory.row(3).tobytes()
        assert row.startswith(own)
        assert len(row) == 2 * len(own)
        assert any(row[len(own) :])
        memory.row(memory.staging)[:] = memory.row(3)
        memory.copy([(7, memory.staging)], restore=True)
        assert torch.equal(engine.kv[7], engine.kv[0])
        memory.copy([(7, 0)])
        assert memory.row(0).tobytes() == row

"""A model that two processes share: rank 0 here, and a worker's own rank 1 in another."""

from __future__ import annotations

import queue
from pathlib import Path

from engine_loop import KV_MEMORY

from core.errors import WorkerLost
from engine.engine import Engine
from engine.gpu.settings import GpuSettings
from worker.rank_settings import RankSettings
from worker.ranks import Ranks


class Leader:
    """On a GPU both ranks share it."""

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        dtype: str = "float32",
        kv_memory: int = KV_MEMORY,
        *,
        random_weights: bool = False,
        gpu: GpuSettings | None = None,
    ) -> None:
        self.lost: queue.SimpleQueue[WorkerLost] = queue.SimpleQueue()
        settings = RankSettings(
            rank=0,
            size=2,
            meeting_point="",
            folder=str(folder),
            dtype=dtype,
            device=device,
            own_devices=False,
            page_size=16,
            kv_memory=kv_memory,
            max_context=None,
            threads=1,
            nice=0,
            random_weights=random_weights,
            transport="auto",
            log_level="info",
            gpu=gpu or GpuSettings(),
        )
        self.ranks = Ranks(settings, [device, device], self.lost.put)

    def load(self) -> Engine:
        settings = self.ranks.settings
        return Engine.load(
            Path(settings.folder),
            dtype=settings.dtype,
            device=settings.device,
            kv_memory=settings.kv_memory,
            random_weights=settings.random_weights,
            gpu=settings.gpu,
            group=self.ranks.group,
        )

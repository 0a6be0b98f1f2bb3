"""Makes the second tier that a worker's configuration asks for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from core.config import CacheConfig
from core.errors import InvalidConfig
from engine.background import BackgroundThread
from engine.engine import Engine
from engine.page_file import PageForm
from engine.page_memory import page_memory
from engine.second_tier import BATCH, SecondTier


def open_second_tier(
    engine: Engine, config: CacheConfig, worker_id: str, wake: Callable[[], None]
) -> None:
    """None where no host memory and no files are to be used. The pool has its root."""
    root, kv = engine.pool.root, engine.kv
    if root is None or not (config.host_memory or config.files):
        return
    page_bytes = kv[0].numel() * kv.element_size()
    if 0 < config.host_memory < page_bytes:
        raise InvalidConfig(
            f"{config.host_memory} bytes hold no page: one takes {page_bytes}",
            field="cache.host_memory",
        )
    # What goes to files passes through host memory.
    rows = max(config.host_memory // page_bytes, BATCH if config.files else 0)
    tier = SecondTier(engine.pool, page_memory(kv, rows), wake, BackgroundThread)
    if config.files:
        form = PageForm(
            root=root,
            dtype=str(kv.dtype).removeprefix("torch."),
            page_size=engine.pool.page_size,
            page_bytes=page_bytes,
        )
        tier.open_files(_folder(config, root, worker_id), config.files_budget, form)


def close_second_tier(
    engine: Engine, config: CacheConfig, worker_id: str, seconds: float, *, for_good: bool
) -> None:
    """Keeps the pages in files, which are written for so many seconds at most. Of a worker that
    is not to come back they are removed: nobody else would find them."""
    tier, root = engine.pool.second_tier, engine.pool.root
    if tier is None or root is None:
        return
    if not for_good:
        tier.close(seconds)
        return
    if tier.files is not None:
        # What is being written would come after the removal.
        tier.files.stop(seconds)
    tier.close(0.0)
    if config.files:
        shutil.rmtree(_folder(config, root, worker_id), ignore_errors=True)


def _folder(config: CacheConfig, root: bytes, worker_id: str) -> Path:
    return Path(config.files).expanduser() / root.hex() / worker_id

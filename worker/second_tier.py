"""Makes the second tier that a worker's configuration asks for."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from baton.core.config import CacheConfig
from baton.core.errors import InvalidConfig
from baton.engine.background import BackgroundThread
from baton.engine.engine import Engine
from baton.engine.page_file import PageForm
from baton.engine.page_memory import PageMemory, page_memory
from baton.engine.second_tier import BATCH, SecondTier

MakeMemory = Callable[[Tensor, int], PageMemory]


def open_second_tier(
    engine: Engine,
    config: CacheConfig,
    worker_id: str,
    wake: Callable[[], None],
    make_memory: MakeMemory = page_memory,
) -> None:
    """None where no host memory and no files are to be used. The pool has its root.

    `make_memory` makes rows of whole pages, also where several ranks have parts of them.
    """
    root, kv, ranks = engine.pool.root, engine.kv, engine.split.size
    if root is None or not (config.host_memory or config.files):
        return
    page_bytes = kv[0].nbytes * ranks
    if 0 < config.host_memory < page_bytes:
        raise InvalidConfig(
            f"{config.host_memory} bytes hold no page: one takes {page_bytes}",
            field="cache.host_memory",
        )
    # What goes to files passes through host memory.
    rows = max(config.host_memory // page_bytes, BATCH if config.files else 0)
    tier = SecondTier(engine.pool, make_memory(kv, rows), wake, BackgroundThread)
    if config.files:
        form = PageForm(
            root=_files_root(root, ranks),
            dtype=str(kv.dtype).removeprefix("torch."),
            page_size=engine.pool.page_size,
            page_bytes=page_bytes,
        )
        tier.open_files(_folder(config, form.root, worker_id), config.files_budget, form)


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
        root = _files_root(root, engine.split.size)
        shutil.rmtree(_folder(config, root, worker_id), ignore_errors=True)


def _files_root(root: bytes, ranks: int) -> bytes:
    """Of several ranks' pages a file has one rank's heads, then the next one's: no other number
    of ranks can read it."""
    if ranks == 1:
        return root
    return hashlib.blake2b(root, digest_size=len(root), person=b"ranks-%d" % ranks).digest()


def _folder(config: CacheConfig, root: bytes, worker_id: str) -> Path:
    return Path(config.files).expanduser() / root.hex() / worker_id

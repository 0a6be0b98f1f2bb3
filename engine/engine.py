"""One model on one device: its weights, its pages, and one step over many sequences."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from core.errors import InvalidConfig
from engine.architecture import Architecture, read_architecture
from engine.checkpoint import checkpoint_files, digest_files
from engine.page_pool import PagePool
from engine.runner import Runner
from engine.sequence import Plan
from engine.weights import load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """Owned by one thread: nothing here may be called from two."""

    def __init__(
        self, runner: Runner, architecture: Architecture, pool: PagePool, kv: Tensor
    ) -> None:
        self._runner = runner
        self.architecture = architecture
        self.pool = pool
        self.kv = kv  # [page, layer, 2, token, kv_head, dim], one allocation
        self.context_length = architecture.context_length
        self.fingerprint = ""

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        page_size: int = 16,
        kv_memory: int = 1 << 30,
        max_context: int | None = None,
        threads: int | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Engine:
        """The model in `folder`, with `kv_memory` bytes of pages.

        `threads` sets how many threads torch uses in this process. `progress`
        is told the fraction of the weights that is loaded.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        architecture = read_architecture(folder)
        kind = _dtype(dtype)
        pages = _pages_within(kv_memory, architecture, page_size, kind)
        model = load_model(folder, architecture, kind, device, progress)
        kv = torch.zeros(_kv_shape(architecture, pages, page_size), dtype=kind, device=device)
        engine = cls(Runner(model, kv), architecture, PagePool(pages, page_size), kv)
        limits = [architecture.context_length, pages * page_size, max_context]
        engine.context_length = min(limit for limit in limits if limit is not None)
        engine.fingerprint = fingerprint(folder, architecture)
        return engine

    def step(self, plan: Plan) -> list[int | None]:
        """Runs all pieces in one forward.

        Returns the next token of each piece that samples, in the plan's order,
        and advances each sequence's `computed`. Appending is up to the caller.
        """
        return self._runner.run(plan)


def fingerprint(folder: Path, architecture: Architecture) -> str:
    """Equal for the same model on any machine; different, as good as always, for another."""
    shape = json.dumps(dataclasses.asdict(architecture), sort_keys=True)
    files = digest_files(checkpoint_files(folder))
    return hashlib.sha256(shape.encode() + files).hexdigest()


def _kv_shape(architecture: Architecture, pages: int, page_size: int) -> tuple[int, ...]:
    return (
        pages,
        architecture.layers,
        2,
        page_size,
        architecture.kv_heads,
        architecture.head_dim,
    )


def _pages_within(
    kv_memory: int, architecture: Architecture, page_size: int, dtype: torch.dtype
) -> int:
    if page_size < 1:
        raise InvalidConfig(f"a page holds at least 1 token, not {page_size}", field="page_size")
    page_bytes = dtype.itemsize
    for size in _kv_shape(architecture, 1, page_size):
        page_bytes *= size
    if kv_memory < page_bytes:
        raise InvalidConfig(
            f"{kv_memory} bytes hold no page: one takes {page_bytes}", field="kv_memory"
        )
    return kv_memory // page_bytes


def _dtype(name: str | torch.dtype) -> torch.dtype:
    known = DTYPES.get(name) if isinstance(name, str) else name
    if known is None or known not in DTYPES.values():
        raise InvalidConfig(
            f"dtype {name} is not supported; supported: {', '.join(DTYPES)}", field="dtype"
        )
    return known

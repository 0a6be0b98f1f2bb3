"""Digests of a pool's pages: whether what arrived is what was sent.

A CPU makes them as core/page_digest.py says. A GPU digests its pages itself, in
another way: two pools of which one is in CPU memory cannot check each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy
import torch

from core.errors import InvalidConfig
from core.page_digest import page_digest
from kv_transfer.transport import PoolMemory

PageDigest = Callable[[Sequence[int]], list[int]]
"""The digests of some pages of one pool, 32 bits each."""


def choose_digest(setting: str, memory: PoolMemory) -> PageDigest | None:
    """What the configuration's `page_digests` means for a pool: "auto", "on" or "off"."""
    if setting == "off" or (setting == "auto" and memory.device != "cpu"):
        return None
    return cpu_digest(memory) if memory.device == "cpu" else gpu_digest(memory)


def gpu_digest(memory: PoolMemory) -> PageDigest:
    """Digests of a pool in a GPU's memory."""
    if memory.page_bytes % 4:
        raise InvalidConfig(
            f"pages of {memory.page_bytes} bytes have no digest on a GPU", field="page_digests"
        )
    from kernels.gpu.digest import digest_pages  # brings triton along

    device = torch.device(memory.device, memory.device_id)
    # Ahead of the engine's kernels, which would otherwise hold up pages that are ready.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def digests(ids: Sequence[int]) -> list[int]:
        with torch.cuda.stream(stream):
            pages = torch.tensor(ids, dtype=torch.int32, device=device)
            found = torch.zeros(len(ids), dtype=torch.int32, device=device)
            digest_pages(memory.base, memory.page_bytes, pages, found)
            return [digest & 0xFFFFFFFF for digest in found.tolist()]

    digests([0])  # compiles it
    return digests


def cpu_digest(memory: PoolMemory) -> PageDigest:
    """Digests of a pool in CPU memory, which must stay allocated while they are used."""
    whole = memoryview((ctypes.c_uint8 * memory.size).from_address(memory.base)).cast("B")
    pages = numpy.frombuffer(whole, dtype=numpy.uint8).reshape(-1, memory.page_bytes)
    return lambda ids: [page_digest(pages[page]) for page in ids]

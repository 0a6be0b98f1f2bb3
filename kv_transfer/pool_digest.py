"""Digests of a pool's pages: whether what arrived is what was sent.

A CPU makes them as core/page_keys.py says. A GPU digests its pages itself, in
another way: two pools of which one is in CPU memory cannot check each other.

Where pools split a page's heads differently, each shard digests those parts of its
pages that it has in common with a shard of the other side's. Of these a page's
digest is made, at either end the same. A GPU digests whole pages only.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy
import torch

from baton.core.errors import InvalidConfig
from baton.core.page_keys import page_digest
from baton.kv_transfer.transport import PagePart, PoolMemory

PeerDigest = Callable[[str, Sequence[int]], list[int]]
"""The digests of some pages that come from a peer, or go there; none where there can be none."""

_SHARE = struct.Struct(">II")  # a shard's first head, and its digest


class PageDigest(Protocol):
    """Digests the pages of one pool, or one shard."""

    def __call__(self, ids: Sequence[int], part: PagePart | None = None) -> list[int]:
        """32 bits for each page, or for our `part` of it; none where there can be none."""


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
    from baton.kernels.gpu.pages import digest_pages  # brings triton along

    device = torch.device(memory.device, memory.device_id)
    # Ahead of the engine's kernels, which would otherwise hold up pages that are ready.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def digests(ids: Sequence[int], part: PagePart | None = None) -> list[int]:
        if part is not None:
            return []
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

    def digests(ids: Sequence[int], part: PagePart | None = None) -> list[int]:
        if part is None:
            return [page_digest(pages[page]) for page in ids]
        rows = pages.reshape(len(pages), part.rows, -1)[:, :, part.local_offset :]
        common = rows[:, :, : part.row_bytes]
        return [page_digest(numpy.ascontiguousarray(common[page]).ravel()) for page in ids]

    return digests


def join_digests(first_heads: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
    """The digests of pages, from those of their parts, each given by its first head.

    None when a part has none. A page that is one part has that part's digest.
    """
    if len(parts) == 1 or not all(parts):
        return list(parts[0]) if len(parts) == 1 else []
    return [
        zlib.crc32(b"".join(map(_SHARE.pack, first_heads, page)))
        for page in zip(*parts, strict=True)
    ]

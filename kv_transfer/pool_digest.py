"""Digests of a pool's pages, to detect pages that arrive damaged.

CPU pools use core/page_keys.py. GPU pools use a kernel with another algorithm, so a
CPU pool and a GPU pool cannot check each other.

Where two pools split the heads differently, each shard digests the parts of its
pages that it has in common with a shard of the peer's; a page's digest combines
these, equally at both ends. A GPU digests whole pages only.
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
"""Digests of pages that come from a peer, or go there; empty where that is impossible."""

_SHARE = struct.Struct(">II")  # a shard's first head, and its digest


class PageDigest(Protocol):
    """Digests the pages of one pool, or one shard."""

    def __call__(self, ids: Sequence[int], part: PagePart | None = None) -> list[int]:
        """32 bits for each page, or its `part`; empty where that is impossible."""


def choose_digest(setting: str, memory: PoolMemory) -> PageDigest | None:
    """The digest of a pool for a configured `page_digests`: "auto", "on" or "off"."""
    if setting == "off" or (setting == "auto" and memory.device != "cpu"):
        return None
    return cpu_digest(memory) if memory.device == "cpu" else gpu_digest(memory)


def gpu_digest(memory: PoolMemory) -> PageDigest:
    if memory.page_bytes % 4:
        raise InvalidConfig(
            f"pages of {memory.page_bytes} bytes have no digest on a GPU", field="page_digests"
        )
    from baton.kernels.gpu.pages import digest_pages  # brings triton along

    device = torch.device(memory.device, memory.device_id)
    # A high-priority stream, so that digests do not wait for the engine's kernels.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def digests(ids: Sequence[int], part: PagePart | None = None) -> list[int]:
        if part is not None:
            return []
        with torch.cuda.stream(stream):
            pages = torch.tensor(ids, dtype=torch.int32, device=device)
            found = torch.zeros(len(ids), dtype=torch.int32, device=device)
            digest_pages(memory.base, memory.page_bytes, pages, found)
            return [digest & 0xFFFFFFFF for digest in found.tolist()]

    digests([0])  # compiles the kernel
    return digests


def cpu_digest(memory: PoolMemory) -> PageDigest:
    """The memory must stay allocated while the digest is used."""
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
    """Combines the digests of pages' parts, each identified by its first head.

    Empty when a part has none. A page that is one part has that part's digest.
    """
    if len(parts) == 1 or not all(parts):
        return list(parts[0]) if len(parts) == 1 else []
    return [
        zlib.crc32(b"".join(map(_SHARE.pack, first_heads, page)))
        for page in zip(*parts, strict=True)
    ]

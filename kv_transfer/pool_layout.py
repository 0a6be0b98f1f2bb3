"""Layouts of pools: whether two can exchange pages, which bytes of a page go where, and digests
that show damaged pages.

Pages are copied byte for byte, so every field of `PoolLayout` must be equal on
both sides. The layout's hash is part of each ticket.

A page is [layer, k/v, token, kv_head, dim] in every shard. So two shards have one
run of heads in common in each row of a token. If both hold the same heads, whole
pages are copied.

A page of latents is [layer, 1, token, 1, dim]: one head, whose first numbers are its
value. All shards of such a pool hold the same whole pages: they are replicas. Each
is filled by one shard of the peer.

A digest of each page shows whether it arrived as it was sent. CPU pools use
core/page_keys.py. GPU pools use a kernel with another algorithm, so a CPU pool and
a GPU pool cannot check each other. If two pools split the heads differently, each
shard digests the parts of its pages that it has in common with a shard of the peer;
both ends combine these in the same way into a page's digest. Equal replicas have one
digest. A GPU digests whole pages only.

Version history of the layout:

    1   [page, layer, k/v, token, kv_head, dim], one page contiguous
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy
import torch

from baton.core.errors import InvalidConfig, LayoutMismatch
from baton.core.page_keys import page_digest
from baton.kv_transfer.transport import PagePart, PoolMemory, check_page_size
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

LAYOUT_VERSION = 1

PeerDigest = Callable[[str, Sequence[int]], list[int]]
"""Returns digests of pages that come from a peer or go to it; empty if there can be none."""

_SHARE = struct.Struct(">II")  # a shard's first head, and its digest


class HeadRange(NamedTuple):
    """A run of key/value heads, as the unsplit model numbers them."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class HeadLink(NamedTuple):
    """One of our shards and one of a peer's shards that have heads in common."""

    shard: int  # ours, by its rank
    pool: PoolAddress  # the peer's
    first_head: int  # of those that both have
    part: PagePart | None  # the part of each page that is copied; None for all


def shards_of(address: PoolAddress) -> list[PoolShard]:
    """The shards of a pool; one with all heads if it is not split."""
    if address.shards:
        return list(address.shards)
    return [PoolShard(first_head=0, heads=address.layout.kv_heads, pool=address)]


def links(ours: Sequence[HeadRange], page_bytes: int, address: PoolAddress) -> list[HeadLink]:
    """The links from our shards to a peer's, in the order of their heads.

    `page_bytes` is the size of a whole page here. Raises LayoutMismatch if the peer's shards do
    not make up such pages.
    """
    check_page_size(page_bytes, address)
    theirs = shards_of(address)
    whole = HeadRange(0, address.layout.kv_heads)
    if all(heads == whole for heads in (*ours, *map(_heads, theirs))):
        return [
            HeadLink(rank % len(ours), shard.pool, 0, None) for rank, shard in enumerate(theirs)
        ]
    if ours == [_heads(shard) for shard in theirs]:
        return [
            HeadLink(rank, shard.pool, shard.first_head, None) for rank, shard in enumerate(theirs)
        ]
    _check_split(theirs, address)
    head_bytes = page_bytes // _rows(address.layout) // address.layout.kv_heads
    return [
        HeadLink(
            rank,
            shard.pool,
            max(mine.first, shard.first_head),
            _part(address.layout, head_bytes, mine, _heads(shard)),
        )
        for shard in theirs
        for rank, mine in enumerate(ours)
        if mine.first < _heads(shard).end and _heads(shard).first < mine.end
    ]


def _part(
    layout: PoolLayout, head_bytes: int, mine: HeadRange, theirs: HeadRange
) -> PagePart | None:
    """The part of a page that two shards have in common; None for all of it."""
    if mine == theirs:
        return None
    first, end = max(mine.first, theirs.first), min(mine.end, theirs.end)
    return PagePart(
        rows=_rows(layout),
        row_bytes=(end - first) * head_bytes,
        local_offset=(first - mine.first) * head_bytes,
        remote_offset=(first - theirs.first) * head_bytes,
    )


def _check_split(shards: Sequence[PoolShard], address: PoolAddress) -> None:
    """Raises LayoutMismatch unless the shards make up a page, each head once."""
    heads = [head for shard in shards for head in range(shard.first_head, _heads(shard).end)]
    complete = heads == list(range(address.layout.kv_heads))
    sizes = [shard.pool.page_bytes * len(heads) for shard in shards]
    if not complete or sizes != [address.page_bytes * shard.heads for shard in shards]:
        raise LayoutMismatch(f"the shards of {address.agent} do not make up a whole page")


def _heads(shard: PoolShard) -> HeadRange:
    return HeadRange(shard.first_head, shard.heads)


def _rows(layout: PoolLayout) -> int:
    """Rows per page. A row holds the heads of one token's keys or values in one layer."""
    return layout.layers * 2 * layout.page_size


def layout_hash(layout: PoolLayout) -> bytes:
    """A digest of the layout's values, independent of the protobuf encoding."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in _layout_fields(layout):
        if value == []:
            continue  # layouts without windows keep the hash they had before the field existed
        digest.update(f"{name}={value!r}\n".encode())
    return digest.digest()


def cache_root(layout: PoolLayout) -> bytes:
    """The root of page keys (core/page_keys.py): equal where pages can be exchanged."""
    return hashlib.blake2b(layout_hash(layout), digest_size=16, person=b"baton-cache").digest()


def describe_mismatch(ours: PoolLayout, theirs: PoolLayout) -> str:
    """The fields that differ, with both values; empty when none does."""
    differing = [
        f"{name} is {our_value!r} here and {their_value!r} there"
        for (name, our_value), (_, their_value) in zip(
            _layout_fields(ours), _layout_fields(theirs), strict=True
        )
        if our_value != their_value
    ]
    return "; ".join(differing)


def _layout_fields(layout: PoolLayout) -> list[tuple[str, int | str | list[int]]]:
    plain = ((name.name, getattr(layout, name.name)) for name in PoolLayout.DESCRIPTOR.fields)
    return [(name, list(value) if name == "windows" else value) for name, value in plain]


class PageDigest(Protocol):
    """Digests the pages of one pool, or one shard."""

    def __call__(self, ids: Sequence[int], part: PagePart | None = None) -> list[int]:
        """Returns 32 bits for each page, or its `part`; empty if there can be none."""


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
    from baton.kernels.gpu.pages import digest_pages  # imports triton

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

    Empty when a part has none. If a page is one part, or its replicas are equal, the digest of
    the part or of one replica is the page's.
    """
    if not all(parts):
        return []
    if len(set(first_heads)) == 1 and all(part == parts[0] for part in parts):
        return list(parts[0])
    return [
        zlib.crc32(b"".join(map(_SHARE.pack, first_heads, page)))
        for page in zip(*parts, strict=True)
    ]

"""Whether two pools can exchange pages, and which bytes of a page go where.

Pages are copied byte for byte, so every field of `PoolLayout` must be equal on
both sides. The layout's hash is part of each ticket.

A page is [layer, k/v, token, kv_head, dim] in every shard. What two shards have in
common is therefore one run of heads in each row of a token. Where both hold the
same heads a page is copied as a whole.

Version history of the layout:

    1   [page, layer, k/v, token, kv_head, dim], one page contiguous
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from baton.core.errors import LayoutMismatch
from baton.kv_transfer.transport import PagePart, check_page_size
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

LAYOUT_VERSION = 1


class HeadRange(NamedTuple):
    """A run of key/value heads, as the unsplit model numbers them."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class HeadLink(NamedTuple):
    """A shard of ours and one of a peer's with heads in common."""

    shard: int  # ours, by its rank
    pool: PoolAddress  # the peer's
    first_head: int  # of those that both have
    part: PagePart | None  # what goes there of each page; None for all


def shards_of(address: PoolAddress) -> list[PoolShard]:
    """The shards of a pool; one with all heads where it is not split."""
    if address.shards:
        return list(address.shards)
    return [PoolShard(first_head=0, heads=address.layout.kv_heads, pool=address)]


def links(ours: Sequence[HeadRange], page_bytes: int, address: PoolAddress) -> list[HeadLink]:
    """The links from our shards to a peer's, in the order of their heads.

    `page_bytes` is the size of a whole page here. Raises LayoutMismatch where the peer's shards
    are no split of such pages.
    """
    check_page_size(page_bytes, address)
    theirs = shards_of(address)
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
    """Rows a page: each holds the heads of one token, of one layer's keys or values."""
    return layout.layers * 2 * layout.page_size


def layout_hash(layout: PoolLayout) -> bytes:
    """A digest of the layout's values, independent of the protobuf encoding."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in _layout_fields(layout):
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


def _layout_fields(layout: PoolLayout) -> list[tuple[str, int | str]]:
    return [(field.name, getattr(layout, field.name)) for field in PoolLayout.DESCRIPTOR.fields]

"""Which heads of a page go from where to where, between two pools that split them.

A page is [layer, k/v, token, kv_head, dim], in every shard: so what two shards
have in common is, in each row of a token, one run of heads at either end. Where
both hold the same heads a page is copied as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.core.errors import LayoutMismatch
from baton.kv_transfer.transport import PagePart
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard


class HeadRange(NamedTuple):
    """Neighbouring key/value heads, as the unsplit model counts them."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class Link(NamedTuple):
    """A shard of ours, and one of a peer's that some of its heads go to."""

    shard: int  # ours, by its rank
    pool: PoolAddress  # the peer's
    first_head: int  # of those that both have
    part: PagePart | None  # what goes there of each page; None for all


def shards_of(address: PoolAddress) -> list[PoolShard]:
    """The shards of a pool; one with all heads where it is not split."""
    if address.shards:
        return list(address.shards)
    return [PoolShard(first_head=0, heads=address.layout.kv_heads, pool=address)]


def links(ours: Sequence[HeadRange], page_bytes: int, address: PoolAddress) -> list[Link]:
    """How pages get to a peer's pool: from which of our shards to which of its.

    `page_bytes` is what a whole page takes here. Links are in the order of their heads,
    so the first one is from the first shard to the first. Raises LayoutMismatch where the
    peer's shards are no split of such pages.
    """
    if address.page_bytes != page_bytes:
        raise LayoutMismatch(
            f"a page is {page_bytes} bytes here and {address.page_bytes} bytes at {address.agent}"
        )
    theirs = shards_of(address)
    if ours == [_heads(shard) for shard in theirs]:
        return [Link(rank, shard.pool, shard.first_head, None) for rank, shard in enumerate(theirs)]
    _check_split(theirs, address)
    head_bytes = page_bytes // _rows(address.layout) // address.layout.kv_heads
    return [
        Link(
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
    """What two shards have in common."""
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

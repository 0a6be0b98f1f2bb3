"""Which bytes of a page go from which shard to which."""

from __future__ import annotations

import pytest

from baton.core.errors import LayoutMismatch
from baton.kv_transfer.pool_layout import HeadRange, join_digests, links
from baton.kv_transfer.transport import PagePart
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

# A page of Llama 8B: 8 heads of 256 bytes in each of 32 * 2 * 16 rows.
LAYOUT = PoolLayout(layers=32, page_size=16, kv_heads=8, head_dim=128, dtype="bfloat16")
ROWS, HEAD_BYTES = 1024, 256
PAGE_BYTES = ROWS * 8 * HEAD_BYTES


def split(size: int) -> list[HeadRange]:
    return [HeadRange(rank * 8 // size, 8 // size) for rank in range(size)]


def address(*ranges: HeadRange, page_bytes: int = PAGE_BYTES) -> PoolAddress:
    if len(ranges) == 1:
        return PoolAddress(agent="0", page_bytes=page_bytes, layout=LAYOUT)
    shards = [
        PoolShard(
            first_head=each.first,
            heads=each.size,
            pool=PoolAddress(agent=str(rank), page_bytes=page_bytes * each.size // 8),
        )
        for rank, each in enumerate(ranges)
    ]
    return PoolAddress(agent="0", page_bytes=page_bytes, layout=LAYOUT, shards=shards)


def plan(ours: int, theirs: int) -> list[tuple[int, str, PagePart | None]]:
    found = links(split(ours), PAGE_BYTES, address(*split(theirs)))
    return [(link.shard, link.pool.agent, link.part) for link in found]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_splits_copy_whole_pages_shard_by_shard(size: int) -> None:
    assert plan(size, size) == [(rank, str(rank), None) for rank in range(size)]


def test_one_process_sends_each_of_two_its_half() -> None:
    half = 4 * HEAD_BYTES
    assert plan(1, 2) == [
        (0, "0", PagePart(ROWS, half, local_offset=0, remote_offset=0)),
        (0, "1", PagePart(ROWS, half, local_offset=half, remote_offset=0)),
    ]


def test_two_processes_send_one_their_halves() -> None:
    half = 4 * HEAD_BYTES
    assert plan(2, 1) == [
        (0, "0", PagePart(ROWS, half, local_offset=0, remote_offset=0)),
        (1, "0", PagePart(ROWS, half, local_offset=0, remote_offset=half)),
    ]


def test_shards_without_common_heads_have_no_link() -> None:
    assert [(shard, agent) for shard, agent, _ in plan(2, 4)] == [
        (0, "0"),
        (0, "1"),
        (1, "2"),
        (1, "3"),
    ]


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 2), (2, 4)])
def test_replicas_each_get_whole_pages_from_one(ours: int, theirs: int) -> None:
    one = PoolLayout(layers=32, page_size=16, kv_heads=1, head_dim=576, dtype="bfloat16")
    shards = [
        PoolShard(heads=1, pool=PoolAddress(agent=str(rank), page_bytes=64))
        for rank in range(theirs)
    ]
    whole = PoolAddress(agent="0", page_bytes=64, layout=one, shards=shards)
    found = links([HeadRange(0, 1)] * ours, 64, whole)
    assert [(link.shard, link.pool.agent, link.part) for link in found] == [
        (rank % ours, str(rank), None) for rank in range(theirs)
    ]


def test_the_digest_of_replicas_is_that_of_one_unless_they_differ() -> None:
    assert join_digests([0], [[7, 8]]) == [7, 8]
    assert join_digests([0, 0], [[7, 8], [7, 8]]) == [7, 8]
    assert join_digests([0, 0], [[7, 8], [7, 9]])[1] != 8
    assert join_digests([0, 4], [[7, 8], [7, 8]]) != [7, 8]


def test_pages_of_another_size_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match=f"{PAGE_BYTES} bytes here and {PAGE_BYTES * 2}"):
        links(split(1), PAGE_BYTES, address(*split(2), page_bytes=2 * PAGE_BYTES))


@pytest.mark.parametrize(
    "ranges",
    [
        [HeadRange(0, 4), HeadRange(5, 3)],
        [HeadRange(0, 4), HeadRange(3, 5)],
        [HeadRange(4, 4), HeadRange(0, 4)],
        [HeadRange(0, 4), HeadRange(4, 2)],
    ],
)
def test_shards_that_make_up_no_page_are_refused(ranges: list[HeadRange]) -> None:
    with pytest.raises(LayoutMismatch, match="do not make up a whole page"):
        links(split(1), PAGE_BYTES, address(*ranges))

from __future__ import annotations

import ctypes
import random

import pytest

from baton.core.errors import InvalidConfig
from baton.kv_transfer.pool_layout import choose_digest, cpu_digest
from baton.kv_transfer.transport import PoolMemory

PAGES = 3


class Pool:
    """Pages of random bytes."""

    def __init__(self, page_bytes: int) -> None:
        content = random.Random(page_bytes).randbytes(PAGES * page_bytes)
        self.buffer = ctypes.create_string_buffer(content, len(content))
        self.memory = PoolMemory(ctypes.addressof(self.buffer), page_bytes, PAGES, "cpu")
        self.digest = cpu_digest(self.memory)


@pytest.mark.parametrize("page_bytes", [8, 1024, 4088, 8192, 3 * 4096 + 16])
def test_every_changed_bit_changes_its_page_and_no_other(page_bytes: int) -> None:
    pool = Pool(page_bytes)
    before = pool.digest([0, 1, 2])
    draw = random.Random(0)
    for place in [0, page_bytes - 1, *draw.choices(range(page_bytes), k=50)]:
        ctypes.c_uint8.from_address(pool.memory.base + page_bytes + place).value ^= (
            1 << draw.randrange(8)
        )
        after = pool.digest([0, 1, 2])
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1]


def test_pages_with_the_same_bytes_have_the_same_digest_in_any_pool() -> None:
    one, other = Pool(8192), Pool(8192)
    assert one.digest([2, 0]) == other.digest([2, 0])
    assert one.digest([2, 0]) == one.digest([0, 2])[::-1]


@pytest.mark.parametrize("block", [64, 512, 4096])
def test_blocks_that_change_places_change_the_digest(block: int) -> None:
    pool = Pool(4 * 4096)
    before = pool.digest([0])
    raw = pool.buffer.raw
    ctypes.memmove(pool.memory.base, raw[block : 2 * block] + raw[:block], 2 * block)
    assert pool.digest([0]) != before


def test_digests_are_made_where_the_setting_and_the_memory_say_so() -> None:
    cpu = Pool(64).memory
    cuda = PoolMemory(0, 64, PAGES, "cuda")
    assert choose_digest("auto", cpu) is not None
    assert choose_digest("on", cpu) is not None
    assert choose_digest("off", cpu) is None
    assert choose_digest("auto", cuda) is None
    with pytest.raises(InvalidConfig):
        choose_digest("on", PoolMemory(0, 63, PAGES, "cuda"))

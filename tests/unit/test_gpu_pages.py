"""Copies of pages and gathered tokens, bit for bit."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from baton.kernels.gpu.pages import (
    COPY_BLOCK,
    DIGEST_BLOCK,
    copy_pages,
    copy_rows,
    digest_pages,
    gather_tokens,
)

POISON = 0x5A


def random_bytes(device: torch.device, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).to(device)


def ids(device: torch.device, pages: int, count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(pages, generator=generator)[:count].to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_bytes", [4, 100, 1 << 14, 4 * COPY_BLOCK + 16, 8 * COPY_BLOCK + 4])
@pytest.mark.parametrize("offset", [0, 4])
def test_pages_arrive_whole_and_their_neighbours_stay(
    device: torch.device, dtype: torch.dtype, page_bytes: int, offset: int
) -> None:
    source = random_bytes(device, 11 * page_bytes + offset)
    found = torch.full((13 * page_bytes + offset,), POISON, dtype=torch.uint8, device=device)
    wanted = found.clone()
    source_pages, target_pages = ids(device, 11, 7, dtype, 1), ids(device, 13, 7, dtype, 2)
    for copy, target in ((copy_pages, found), (reference.copy_pages, wanted)):
        copy(
            source.data_ptr() + offset,
            target.data_ptr() + offset,
            page_bytes,
            source_pages,
            target_pages,
        )
    assert torch.equal(found, wanted)
    pages = found[offset:].view(13, page_bytes)
    assert torch.equal(
        pages[target_pages.long()], source[offset:].view(11, -1)[source_pages.long()]
    )
    others = [page for page in range(13) if page not in target_pages.tolist()]
    assert (pages[others] == POISON).all()


@pytest.mark.parametrize(("row_bytes", "strides"), [(16, (32, 16)), (1024, (1024, 2048))])
def test_rows_arrive_and_what_lies_between_them_stays(
    device: torch.device, row_bytes: int, strides: tuple[int, int]
) -> None:
    source = random_bytes(device, 11 * strides[0])
    found = torch.full((13 * strides[1],), POISON, dtype=torch.uint8, device=device)
    wanted = found.clone()
    rows = ids(device, 11, 7, torch.int64, 1), ids(device, 13, 7, torch.int64, 2)
    for copy, target in ((copy_rows, found), (reference.copy_rows, wanted)):
        copy(source.data_ptr(), target.data_ptr(), row_bytes, strides, *rows)
    assert torch.equal(found, wanted)
    there, here = found.view(13, -1), source.view(11, -1)
    assert torch.equal(there[rows[1], :row_bytes], here[rows[0], :row_bytes])
    assert (there[:, row_bytes:] == POISON).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 64), (3, 80), (8, 128), (40, 128)])
@pytest.mark.parametrize("length", [1, 37, 48])
def test_gathered_tokens_are_the_pages_first(
    device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int, length: int
) -> None:
    kv = random_bytes(device, 9 * 2 * 2 * 16 * kv_heads * dim * dtype.itemsize)
    layer = kv.view(torch.int8).view(dtype).view(9, 2, 2, 16, kv_heads, dim)[:, 1]
    pages = ids(device, 9, 3, torch.int64, seed=3)
    found, wanted = (
        torch.full((2, length + 1, kv_heads, dim), -7.0, dtype=dtype, device=device)
        for _ in range(2)
    )
    gather_tokens(layer, pages, length, found[0], found[1])
    reference.gather_tokens(layer, pages, length, wanted[0], wanted[1])
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert (found[:, length] == -7.0).all()


@pytest.mark.parametrize("page_bytes", [4, 100, 4 * DIGEST_BLOCK, 8 * DIGEST_BLOCK + 16])
def test_digests_of_pages_match_the_reference(device: torch.device, page_bytes: int) -> None:
    memory = random_bytes(device, 9 * page_bytes)
    pages = ids(device, 9, 5, torch.int32, seed=4)
    found, wanted = (torch.zeros(5, dtype=torch.int32, device=device) for _ in range(2))
    digest_pages(memory.data_ptr(), page_bytes, pages, found)
    reference.digest_pages(memory.data_ptr(), page_bytes, pages, wanted)
    assert torch.equal(found, wanted)
    assert len(set(found.tolist())) == 5


def test_a_changed_bit_and_swapped_words_change_a_digest(device: torch.device) -> None:
    page = random_bytes(device, 4 * DIGEST_BLOCK + 64).view(torch.int32)
    changed, swapped = page.clone(), page.clone()
    changed[DIGEST_BLOCK + 7] ^= 1 << 31
    swapped[:16], swapped[16:32] = page[16:32], page[:16]
    digests = torch.zeros(3, dtype=torch.int32, device=device)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    for index, each in enumerate((page, changed, swapped)):
        digest_pages(each.data_ptr(), each.nbytes, first, digests[index : index + 1])
    assert len(set(digests.tolist())) == 3

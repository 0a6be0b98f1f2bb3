"""Memory in huge pages holds what is put there, in places of its own."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import huge_pages

SIZES = [(1,), (3, 5), (63,), (576, 576), (9_000_000,), (2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_copies_keep_their_numbers_beside_each_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = [(torch.randn(size) * 20).to(dtype) for size in SIZES]
    copies = [huge_pages.copied(each) for each in numbers]
    for number, copy in zip(numbers, copies, strict=True):
        assert torch.equal(copy, number)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
    copies[2].zero_()
    assert all(torch.equal(copies[at], numbers[at]) for at in (0, 1, 3, 4, 5))


def test_a_copy_of_a_view_is_laid_out_anew() -> None:
    turned = torch.randn(32, 48).T
    copy = huge_pages.copied(turned)
    assert torch.equal(copy, turned)
    assert copy.is_contiguous()


def test_zeros_are_zeros_of_their_shape() -> None:
    found = huge_pages.zeros((3, 7), torch.bfloat16)
    assert found.shape == (3, 7)
    assert not found.any()
    found.fill_(1)
    assert found.float().sum() == 21

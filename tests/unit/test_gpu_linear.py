"""The products of few rows, and what surrounds the layers, against their references."""

from __future__ import annotations

import math
from typing import get_args

import kernel_reference as reference
import pytest
import torch
from kernel_checks import assert_close, types_for
from torch import Tensor

from baton.kernels.gpu.linear import few_rows, few_rows_alone, few_rows_onto
from baton.kernels.gpu.tokens import begin, remember
from baton.kernels.linear import Activation

SHAPES = [(1, 128, 64), (3, 70, 100), (17, 256, 33)]


class Source:
    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator) / shape[-1] ** 0.5
        return values.to(self.device, self.dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "hidden", "inner"), SHAPES)
def test_a_sum_and_the_product_that_reads_it_match_the_reference(
    device: torch.device, rows: int, hidden: int, inner: int, bias: bool
) -> None:
    for dtype in types_for(device, torch.bfloat16):
        source = Source(device, dtype, rows + hidden)
        residual, x = source.random(rows, hidden), source.random(rows, inner)
        down, norm = source.random(hidden, inner), source.random(hidden)
        down_bias = source.random(hidden) if bias else None
        summed = residual.clone()
        found = few_rows_onto(x, down, residual, norm, 1e-5, down_bias)
        wanted = reference.few_rows_onto(x, down, summed, norm, 1e-5, down_bias)
        assert_close(residual, summed)
        assert_close(found.x, wanted.x)
        assert found.squares is not None
        assert wanted.squares is not None
        assert_close(found.squares.sum(dim=0), wanted.squares.sum(dim=0))
        alone = torch.full_like(residual, math.nan)
        assert few_rows_alone(x, down, alone) is alone
        assert_close(alone, reference.few_rows_alone(x, down))
        up = source.random(2 * inner, hidden)
        up_bias = source.random(2 * inner) if bias else None
        for gates in (None, *get_args(Activation)):
            product = few_rows(found, up, up_bias, gates)
            assert_close(product, reference.few_rows(found, up, up_bias, gates))


def test_a_step_finds_the_tokens_and_pages_of_the_one_before(device: torch.device) -> None:
    def ints(*values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    staged, rows = ints(7, -1, -1, 9), ints(0, 2, 1, 3)
    pages = ints((5, 60), (19, 61))
    results = []
    for start, keep in ((begin, remember), (reference.begin, reference.remember)):
        last, table = ints(10, -1, 12, 13), torch.zeros(4, 5, dtype=torch.int32, device=device)
        tokens = torch.full_like(staged, -5)
        start(staged, rows, last, tokens, table, pages)
        keep(ints(40, 41), ints(3, 0), last)
        results.append((tokens.tolist(), table.tolist(), last.tolist()))
    assert results[0] == results[1]
    assert results[0][0] == [7, 12, 0, 9], "a row that has no token yet gets the first"

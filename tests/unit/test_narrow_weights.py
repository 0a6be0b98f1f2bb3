"""Weights in float32 that bfloat16 holds as well: half the bytes, the same bits."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import AVX2, AVX512, Registers
from baton.kernels.linear import Linear, RMSNorm

if not compiler.available():
    pytest.skip("needs compiled kernels", allow_module_level=True)

from baton.kernels.cpu.panels import Panels  # imports llvmlite

MOST_ROWS = 64
NORM = RMSNorm(torch.rand(96), 1e-5)


@pytest.fixture(params=[compiler.registers(), AVX2, AVX512], ids=["this", "avx2", "avx512"])
def _vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this CPU and of others, which LLVM cuts into this one's."""
    registers: Registers = request.param
    monkeypatch.setattr(compiler, "registers", lambda: registers)


@pytest.mark.usefixtures("_vectors")
def test_products_have_the_same_bits() -> None:
    weight, rows = torch.randn(208, 96).bfloat16().float(), torch.randn(MOST_ROWS, 96)
    residual = torch.randn(MOST_ROWS, 208)
    layer, wide = Linear(weight), Panels(weight, None)
    layer.pack(of_few_rows=True)
    assert layer._panels
    assert 2 * layer._panels._panels.nbytes == wide._panels.nbytes
    for count in (*range(1, 20), MOST_ROWS):
        x, added = rows[:count], residual[:count]
        assert torch.equal(layer(x), wide.product(x, None))
        assert torch.equal(layer(x, NORM), wide.product(x, NORM))
        assert torch.equal(layer.logits(x, NORM), wide.unrounded(x, NORM))
        assert torch.equal(layer.add_to(added, x), wide.add_to(added, x))

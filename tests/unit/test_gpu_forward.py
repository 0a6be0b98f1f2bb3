"""Products onto the residual, in one part or in two: against float64."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch

from baton.engine.gpu.forward import SPLIT_ROWS, _is_split, _onto
from baton.kernels.linear import Linear

EPSILON = 1e-5


@pytest.mark.parametrize("rows", [SPLIT_ROWS.start - 1, SPLIT_ROWS.start, SPLIT_ROWS.stop - 1])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_added_to_the_residual_and_normed(
    device: torch.device, rows: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    linear = Linear(random(64, 256), random(64) if biased else None)
    residual, x, norm = random(rows, 64), random(rows, 256), random(64)
    bias = 0.0 if linear.bias is None else linear.bias.double()
    wanted = residual.double() + x.double() @ linear.weight.double().T + bias
    normed = _onto(residual, linear, x, norm, EPSILON)
    assert _is_split(linear, x) == (rows in SPLIT_ROWS and not biased)
    torch.testing.assert_close(residual.double(), wanted, rtol=0.02, atol=0.25)
    torch.testing.assert_close(normed, reference.rms_norm(residual, norm, EPSILON))

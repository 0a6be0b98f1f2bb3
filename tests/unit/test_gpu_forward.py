"""Products onto the residual, in every form: against float64."""

from __future__ import annotations

from pathlib import Path

import kernel_reference as reference
import pytest
import torch
from tiny_models import TINY_MODELS, save

from baton.engine.architecture import read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.gpu.forward import SPLIT_ROWS, Forward, _is_split
from baton.engine.gpu.numerics import Numerics
from baton.engine.weights import load_model
from baton.kernels.linear import Linear


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("rows", [3, SPLIT_ROWS.start - 1, SPLIT_ROWS.start, SPLIT_ROWS.stop - 1])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_added_to_the_residual_and_scaled(
    device: torch.device, tmp_path: Path, rows: int, biased: bool, numerics: Numerics
) -> None:
    generator = torch.Generator().manual_seed(rows)
    # The interpreter has no products in bfloat16.
    interpreted = device.type == "cpu" and rows < SPLIT_ROWS.start - 1
    dtype = torch.float32 if interpreted else torch.bfloat16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    save(TINY_MODELS["llama"], tmp_path)
    model = load_model(Checkpoint(tmp_path), read_architecture(tmp_path), dtype, str(device))
    linear = Linear(random(64, 256), random(64) if biased else None)
    residual, x, norm = random(rows, 64), random(rows, 256), random(64)
    bias = 0.0 if linear.bias is None else linear.bias.double()
    wanted = residual.double() + x.double() @ linear.weight.double().T + bias
    scaled = Forward(model, numerics)._onto(residual, linear, x, norm)
    assert _is_split(linear, x) == (rows in SPLIT_ROWS and not biased)
    torch.testing.assert_close(residual.double(), wanted, rtol=0.02, atol=0.25)
    expected = reference.scale_rows(residual, norm, model.architecture.norm_epsilon)
    torch.testing.assert_close(scaled.x, expected.x)

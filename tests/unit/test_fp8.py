"""Weights and rows as FP8 codes, against their definition, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import kernel_reference as reference
import pytest
import torch
from kernel_checks import assert_close, types_for
from tiny_models import TINY_MODELS, save
from torch import Tensor

from baton.cluster.preflight import prepare
from baton.core.config import parse
from baton.core.errors import InvalidConfig
from baton.engine.engine import Engine
from baton.kernels.fp8 import fp8_product, quantize_to_fp8
from baton.kernels.gpu.fp8_rows import Fp8Rows, Fp8Scales, Fp8Sums, fp8_rows
from baton.kernels.gpu.gate import gate_and_multiply, gate_to_codes
from baton.kernels.gpu.linear import few_rows, few_rows_alone, few_rows_onto
from baton.kernels.gpu.norm import Scaled, scale_rows
from baton.kernels.linear import Activation

SHAPES = [(1, 128, 64), (3, 80, 272), (17, 256, 48), (70, 64, 128)]


def test_the_greatest_number_has_the_greatest_code() -> None:
    codes, scales = quantize_to_fp8(torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert codes.float().tolist() == [[112.0, -448.0, 224.0], [0.0, 0.0, 0.0]]
    assert (448 * scales[:1]).tolist() == pytest.approx([2.0])


def test_a_product_is_that_of_the_numbers_the_codes_stand_for() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96), quantize_to_fp8(torch.randn(7, 96))
    codes, scales = quantize_to_fp8(x)
    exact = (codes.double() * scales[:, None]) @ (weight.codes.double() * weight.scales[:, None]).T
    torch.testing.assert_close(fp8_product(x, weight).double(), exact, rtol=1e-6, atol=1e-6)
    error = (exact - x.double() @ (weight.codes.double() * weight.scales[:, None]).T).norm()
    assert 0 < error / exact.norm() < 0.05


@pytest.mark.parametrize("size", [16, 100, 576])
def test_rows_have_the_codes_of_the_definition(device: torch.device, size: int) -> None:
    torch.manual_seed(size)
    for dtype in types_for(device, torch.bfloat16):
        x = (torch.randn(9, size) * torch.logspace(-12, 4, 9)[:, None]).to(device, dtype)
        x[4] = 0.0
        codes, scales = fp8_rows(x)
        wanted = quantize_to_fp8(x)
        assert torch.equal(codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(scales, wanted.scales)


@pytest.mark.parametrize("size", [16, 100, 576])
def test_a_norm_and_a_gate_leave_the_codes_of_what_they_would_leave(
    device: torch.device, size: int
) -> None:
    torch.manual_seed(size)
    for dtype in types_for(device, torch.bfloat16):
        residual, part = (torch.randn(2, 5, size) * 3).to(device, dtype)
        norm, other = torch.randn(size).to(device, dtype), residual.clone()
        plain = scale_rows(residual, norm, 1e-5, part[None])
        found = scale_rows(other, norm, 1e-5, part[None], codes=True)
        assert torch.equal(residual, other)
        assert found.squares is not None
        assert plain.squares is not None
        assert torch.equal(found.squares, plain.squares)
        assert_same_codes(found.read, fp8_rows(plain.x))
        gate_up, bias = torch.randn(6, 2 * size).to(device, dtype).split([5, 1])
        for source, biases in ((plain, None), (Scaled(plain.x, None, 1e-5), bias[0])):
            gated = gate_and_multiply(gate_up, source, biases, "silu")
            assert_same_codes(gate_to_codes(gate_up, source, biases, "silu"), fp8_rows(gated))


@pytest.mark.parametrize("size", [16, 100, 1576])
def test_sums_are_added_to_a_residual_with_their_scales(device: torch.device, size: int) -> None:
    torch.manual_seed(size)
    for dtype in types_for(device, torch.bfloat16):
        sums, residual = torch.randn(2, 5, size).to(device, dtype)
        norm, other = torch.randn(size).to(device, dtype), residual.clone()
        scales = Fp8Scales(torch.rand(5).to(device), torch.rand(size).to(device))
        found = scale_rows(residual, norm, 1e-5, sums[None], part_scales=scales)
        wanted = sums.double() * scales.rows[:, None] * scales.outputs
        product = Fp8Sums(sums, scales).scaled()
        assert_close(product, wanted.to(dtype))
        plain = scale_rows(other, norm, 1e-5, product[None])
        assert torch.equal(residual, other)
        assert torch.equal(found.x, plain.x)


def assert_same_codes(found: Tensor | Fp8Rows, wanted: Fp8Rows) -> None:
    assert isinstance(found, Fp8Rows)
    assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(found.scales, wanted.scales)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "hidden", "inner"), SHAPES)
def test_products_match_the_reference(
    device: torch.device, rows: int, hidden: int, inner: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)

    def close(found: Tensor, wanted: Tensor) -> None:
        if device.type == "cpu":
            assert_close(found, wanted)
        else:  # tensor cores add products of FP8 with 14 bits
            assert (found.double() - wanted.double()).norm() < 1e-2 * wanted.double().norm()

    for dtype in types_for(device, torch.bfloat16):
        x, residual, norm = random(rows, inner), random(rows, hidden), random(hidden)
        down, up = (
            quantize_to_fp8(random(hidden, inner)),
            quantize_to_fp8(random(2 * inner, hidden)),
        )
        down_bias, up_bias = (random(hidden), random(2 * inner)) if bias else (None, None)
        product = fp8_product(x, down).to(dtype)
        close(few_rows_alone(x, down), product)
        close(few_rows_alone(x, down, onto=True), product)
        summed = residual.clone()
        found = few_rows_onto(x, down, residual, norm, 1e-5, down_bias)
        part = product if down_bias is None else product + down_bias
        wanted = reference.scale_rows(summed, norm, 1e-5, part[None])
        close(residual, summed)
        close(found.x, wanted.x)
        for gates in (None, *get_args(Activation)):
            product = fp8_product(found.x, up).to(dtype)
            settled = reference.settled(product, found, up_bias).to(dtype)
            if gates:
                settled = reference.gate_and_multiply(product, found, up_bias, gates)
            close(few_rows(found, up, up_bias, gates), settled)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"device": "cpu"}, "CPUs have int8 and int4, not fp8; quantization is fp8"),
        ("llama", {"device": "cuda", "dtype": "float16"}, "fp8 needs dtype bfloat16, not float16"),
        ("mixtral", {"device": "cuda"}, "experts are not quantized on GPUs yet"),
        ("llama", {"engine": "transformers"}, "through transformers cannot be quantized"),
    ],
)
def test_what_fp8_does_not_go_with_is_refused_before_the_start(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save(TINY_MODELS[family], tmp_path)
    config = parse({"model": str(tmp_path), "quantization": "fp8", **changes})
    with pytest.raises(InvalidConfig, match=message):
        prepare(config)


def test_an_engine_on_a_cpu_refuses_fp8(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    with pytest.raises(InvalidConfig, match="CPUs have int8 and int4, not fp8"):
        Engine.load(tmp_path, quantization="fp8")

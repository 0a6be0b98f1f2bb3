"""What adapters add to products on a GPU, against the references."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import kernel_reference as reference
import latent_reference
import numpy as np
import pytest
import torch
from kernel_checks import assert_close, types_for
from tiny_models import TINY_MODELS, save
from torch import Tensor

from baton.engine.architecture import read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.gpu.adapter_rows import StepAdapters, arrange_rows, tile_count
from baton.engine.gpu.forward import Forward
from baton.engine.gpu.numerics import Numerics
from baton.engine.weights import load_model
from baton.kernels.fp8 import Fp8Weight
from baton.kernels.gpu.adapted_gate import expand_and_gate
from baton.kernels.gpu.gate import gate_and_multiply
from baton.kernels.gpu.latent_low_rank import LatentAdapters
from baton.kernels.gpu.linear import few_rows, few_rows_alone, few_rows_onto
from baton.kernels.gpu.low_rank import (
    MOST_PARTS,
    AdapterStack,
    ProductAdapters,
    SlotRows,
    expand_onto,
)
from baton.kernels.gpu.norm import scale_rows
from baton.kernels.gpu.shrink import shrink
from baton.kernels.linear import Activation, Linear

SLOTS = 12
MIXED = [2, -1, 0, 2, 1, 11, -1, 2, 5]
MANY = [0] * 40 + [-1] * 5 + [3] * 3 + [0] * 10 + MIXED
HIDDEN, INNER = 136, 70


class Step:
    """Rows with adapters, and a layer of three modules, of two or of one."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, slots: list[int], rank: int = 16
    ) -> None:
        self.device, self.dtype, self.rank = device, dtype, rank
        self._generator = torch.Generator().manual_seed(len(slots) + rank)
        arrays = arrange_rows(np.array(slots, np.int32), tile_count(len(slots), SLOTS))
        self.rows = SlotRows(*(torch.from_numpy(each).to(device) for each in arrays))

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator) / shape[-1] ** 0.5
        return values.to(self.device, self.dtype)

    def stack(self, inputs: int, *ends: int) -> AdapterStack:
        a = self.random(SLOTS, len(ends) * self.rank, inputs)
        return AdapterStack(a, self.random(SLOTS, ends[-1], self.rank), ends)

    def adapters(self, stack: AdapterStack) -> ProductAdapters:
        """For one product."""
        counters = torch.zeros(1 + MOST_PARTS * len(self.rows.tiles), dtype=torch.int32)
        ready, done = counters.to(self.device).split([1, len(counters) - 1])
        return ProductAdapters(stack, self.rows, done, ready)


@pytest.mark.parametrize("rank", [16, 32, 256])
def test_products_with_adapters_match_the_reference(device: torch.device, rank: int) -> None:
    for dtype in types_for(device, torch.bfloat16):
        step = Step(device, dtype, MIXED, rank)
        residual, x = step.random(len(MIXED), HIDDEN), step.random(len(MIXED), INNER)
        down, norm, bias = step.random(HIDDEN, INNER), step.random(HIDDEN), step.random(HIDDEN)
        stack, summed = step.stack(INNER, HIDDEN), residual.clone()
        adapters = step.adapters(stack)
        shrunk, known = shrink(x, adapters), reference.shrink(x, adapters)
        adapted = step.rows.slots >= 0
        assert_close(shrunk.parts[:, adapted], known.parts[:, adapted])
        found = few_rows_onto(x, down, residual, norm, 1e-5, bias, adapters)
        wanted = reference.few_rows_onto(x, down, summed, norm, 1e-5, bias, adapters)
        assert_close(residual, summed)
        assert_close(found.x, wanted.x)
        qkv, qkv_bias = step.random(200, HIDDEN), step.random(200)
        adapters = step.adapters(step.stack(HIDDEN, 100, 150, 200))
        product = few_rows(found, qkv, qkv_bias, adapters=adapters)
        assert_close(product, reference.few_rows(found, qkv, qkv_bias, adapters=adapters))
        gate_up = step.random(2 * INNER, HIDDEN)
        for stack in (step.stack(HIDDEN, INNER, 2 * INNER), step.stack(HIDDEN, 2 * INNER)):
            for gates in get_args(Activation):
                adapters = step.adapters(stack)
                assert_close(
                    few_rows(found, gate_up, None, gates, adapters=adapters),
                    reference.few_rows(found, gate_up, None, gates, adapters),
                )
            assert not adapters.done.any()


def test_a_product_of_many_rows_gets_what_adapters_add(device: torch.device) -> None:
    for dtype in types_for(device, torch.bfloat16):
        step = Step(device, dtype, MANY)
        x, product = step.random(len(MANY), 700), step.random(len(MANY), 200)
        adapters, known = step.adapters(step.stack(700, 90, 150, 200)), product.clone()
        expand_onto(product, shrink(x, adapters))
        reference.expand_onto(known, reference.shrink(x, adapters))
        assert_close(product, known)
        assert not adapters.done.any()


@pytest.mark.parametrize("slots", [MANY, [-1] * 50, [4] * 64], ids=["some", "none", "all"])
def test_gates_of_many_rows_get_what_adapters_add(device: torch.device, slots: list[int]) -> None:
    """With the bits of expanding, then gating."""
    for dtype in types_for(device, torch.bfloat16):
        step = Step(device, dtype, slots)
        source = scale_rows(step.random(len(slots), HIDDEN), step.random(HIDDEN), 1e-5)
        product, bias = step.random(len(slots), 2 * INNER), step.random(2 * INNER)
        for ends in ((INNER, 2 * INNER), (2 * INNER,)):
            adapters = step.adapters(step.stack(HIDDEN, *ends))
            for gates in get_args(Activation):
                shrunk, separate = shrink(source.x, adapters), product.clone()
                found = expand_and_gate(product, shrunk, source, bias, gates)
                expand_onto(separate, shrunk)
                assert torch.equal(found, gate_and_multiply(separate, source, bias, gates))
                known = product.clone()
                reference.expand_onto(known, reference.shrink(source.x, adapters))
                assert_close(found, reference.gate_and_multiply(known, source, bias, gates))


def test_rows_have_the_same_bits_in_any_company(device: torch.device) -> None:
    """Alone, among others, and where the product is made first; without an adapter as without
    any."""
    for dtype in types_for(device, torch.bfloat16):
        step = Step(device, dtype, MIXED)
        source = scale_rows(step.random(len(MIXED), HIDDEN), step.random(HIDDEN), 1e-5)
        weight, stack = step.random(200, HIDDEN), step.stack(HIDDEN, 90, 150, 200)
        together = few_rows(source, weight, adapters=step.adapters(stack))
        plain = few_rows(source, weight)
        product = few_rows_alone(source.x, weight)
        expand_onto(product, shrink(source.x, step.adapters(stack)))
        settled = reference.settled(product, source, None)
        assert_close(together, settled.to(dtype))
        for row, slot in enumerate(MIXED):
            alone = Step(device, dtype, [slot])
            mine = source.rows(torch.tensor([row], device=device))
            found = few_rows(mine, weight, adapters=alone.adapters(stack))
            assert torch.equal(found[0], together[row])
            assert torch.equal(together[row], plain[row]) == (slot < 0)


@pytest.mark.parametrize("rank", [16, 128])
def test_products_between_latents_and_heads_get_what_adapters_add(
    device: torch.device, rank: int
) -> None:
    """Rows have the same bits alone; those without an adapter are left as they are."""
    slots, heads, size, plain, value = [0] * 33 + MIXED, 3, 72, 24, 20
    for dtype in types_for(device, torch.bfloat16):
        step = Step(device, dtype, slots, rank)
        stack = step.stack(size, heads * (plain + value))
        queries = step.random(len(slots), heads, plain + 8)[..., :plain]
        attended = step.random(len(slots), heads, size)
        before = step.random(len(slots), heads, size + 8), step.random(len(slots), heads, value)
        together = [each.clone() for each in before]
        adapters = LatentAdapters(stack, step.rows, step.rows)
        adapters.absorb(queries, together[0])
        adapters.expand(attended, together[1])
        wanted = [each.clone() for each in before]
        latent_reference.absorb(queries, stack, step.rows, wanted[0][..., :size])
        latent_reference.expand(attended, stack, step.rows, wanted[1])
        for found, known in zip(together, wanted, strict=True):
            assert_close(found, known)
        for row in (0, 32, 33, 34, 37):
            rows = Step(device, dtype, [slots[row]]).rows
            alone = [each[row : row + 1].clone() for each in before]
            LatentAdapters(stack, rows, rows).absorb(queries[row : row + 1], alone[0])
            LatentAdapters(stack, rows, rows).expand(attended[row : row + 1], alone[1])
            for found, each, known in zip(alone, together, before, strict=True):
                assert torch.equal(found[0], each[row])
                assert torch.equal(each[row], known[row]) == (slots[row] < 0)


def test_adapters_add_to_no_product_whose_rows_have_none(device: torch.device) -> None:
    step = Step(device, torch.float32, MIXED)
    nothing = SlotRows(*(torch.from_numpy(each) for each in arrange_rows(np.array([-1, -1]))))
    linear, counters = Linear(step.random(HIDDEN, 128)), torch.zeros(1, dtype=torch.int32)
    adapters = StepAdapters({linear: step.stack(128, HIDDEN)}, step.rows, nothing, counters)
    assert adapters.of_product(linear)
    assert adapters.of_samples().of_product(linear) is None
    assert adapters.of_product(Linear(step.random(HIDDEN, 128))) is None


@pytest.mark.parametrize("slots", [MIXED, [0] * 36 + MIXED], ids=len)
def test_adapters_add_to_quantized_products_of_one_tile_and_of_more(
    device: torch.device, slots: list[int], tmp_path: Path
) -> None:
    """In FP8 a product of more rows than a tile has the sum and the norm inside, too."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    save(TINY_MODELS["llama"], tmp_path)
    model = load_model(Checkpoint(tmp_path), read_architecture(tmp_path), dtype, str(device))
    step, rows = Step(device, dtype, slots), len(slots)
    linear, stack = Linear(step.random(HIDDEN, 128)), step.stack(128, HIDDEN)
    residual, x, norm = step.random(rows, HIDDEN), step.random(rows, 128), step.random(HIDDEN)
    linear.quantize("fp8")
    assert isinstance(linear.kept, Fp8Weight)
    product = few_rows_alone(x, linear.kept)
    reference.expand_onto(product, reference.shrink(x, step.adapters(stack)))
    summed = residual.clone()
    wanted = reference.scale_rows(summed, norm, model.architecture.norm_epsilon, product[None])
    counters = torch.zeros(1 + len(step.rows.tiles), dtype=torch.int32, device=device)
    adapters = StepAdapters({linear: stack}, step.rows, step.rows, counters)
    found = Forward(model, Numerics.INVARIANT)._onto(residual, linear, x, norm, None, adapters)
    assert_close(residual, summed)
    assert_close(found.x, wanted.x)

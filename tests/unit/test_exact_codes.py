"""float32 weights kept as codes: the same bits as without, and which weights are kept so."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from engine_loop import answer, load
from gguf import GGMLQuantizationType
from gguf_files import SHAPE, write_gguf
from tiny_models import TinyModel, build
from torch import Tensor

from baton.core import model_store
from baton.engine.checkpoint import Cut
from baton.kernels import exact_codes
from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import AVX2, AVX512, NEON, Registers
from baton.kernels.exact_codes import ExactWeight, FineGrid, encode
from baton.kernels.linear import GatedLinear, Linear, RMSNorm

pytestmark = pytest.mark.skipif(not compiler.available(), reason="nothing can be compiled")

PROMPT = list(range(3, 40))
KINDS = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32}
KINDS |= {"Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
"""Types of GGUF whose codes are kept, and the inputs of a group."""


def weight_on_grid(outputs: int, inputs: int, group: int) -> tuple[Tensor, FineGrid]:
    """Scales and offsets in float16 times a small integer, as in GGUF's K-quants."""
    groups = inputs // group
    steps = torch.randint(1, 64, (2, outputs, groups)).float()
    halves = (torch.rand(2, outputs, groups) * 1e-2).half().float()
    scales, offsets = steps * halves
    grid = FineGrid(scales, -offsets, group)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int8)
    return ExactWeight(codes, grid).numbers(), grid


@pytest.mark.parametrize("registers", [None, AVX2, AVX512, NEON], ids=str)
@pytest.mark.parametrize("group", [16, 32])
def test_products_have_the_bits_of_float32(
    group: int, registers: Registers | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if registers:
        monkeypatch.setattr(compiler, "registers", lambda: registers)
    norm = RMSNorm(torch.rand(96), 1e-5)
    for outputs, rows in itertools.product((20, 48, 130), (1, 2, 8, 9, 21)):
        weight, grid = weight_on_grid(2 * outputs, 96, group)
        plain, coded = (Linear(weight.clone(), torch.ones(2 * outputs)) for _ in range(2))
        gated, coded_gates = (GatedLinear(weight.clone()) for _ in range(2))
        assert coded.keep_codes(grid)
        assert coded_gates.keep_codes(grid)
        for each in (plain, coded, gated, coded_gates):
            each.pack()
        x, residual = torch.randn(rows, 96), torch.randn(rows, 2 * outputs)
        assert torch.equal(coded(x, norm), plain(x, norm))
        assert torch.equal(coded.add_to(residual, x), plain.add_to(residual, x))
        assert torch.equal(coded_gates(x, None), gated(x, None))


def test_compiled_code_finds_the_codes_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, grid = weight_on_grid(70, 160, 32)
    grid.scales[3, 1] = 0.0
    weight[3, 32:64] = grid.offsets[3, 1]
    compiled = encode(weight, grid)
    monkeypatch.setattr(exact_codes.compiler, "suits", lambda *_: False)
    by_torch = encode(weight, grid)
    assert compiled is not None
    assert by_torch is not None
    assert torch.equal(compiled.codes, by_torch.codes)
    assert torch.equal(compiled.numbers(), weight)


@pytest.mark.parametrize("compiled", [True, False])
def test_only_weights_on_the_grid_are_kept_as_codes(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(exact_codes.compiler, "suits", lambda *_: False)
    weight, grid = weight_on_grid(48, 64, 32)
    assert encode(weight, grid) is not None
    changed = weight.clone()
    changed[7, 9] = torch.nextafter(weight[7, 9], torch.tensor(2.0))
    assert encode(changed, grid) is None
    far = weight.clone()
    far[0, :32] = grid.offsets[0, 0] + grid.scales[0, 0] * 300
    assert encode(far, grid) is None
    # The product of a scale of 24 bits and a code would be rounded.
    rounded = grid._replace(scales=torch.full_like(grid.scales, 1 / 3))
    codes = torch.randint(1, 16, weight.shape, dtype=torch.int8)
    assert encode(ExactWeight(codes, rounded).numbers(), rounded) is None


def test_a_cut_between_groups_cuts_the_grid() -> None:
    weight, grid = weight_on_grid(6, 128, 32)
    for cut in (Cut(0, 6, ((1, 2), (4, 2))), Cut(1, 128, ((32, 64),))):
        found = cut.of_grid(grid)
        assert found is not None
        assert encode(cut.of(weight), found) is not None
    assert Cut(1, 128, ((16, 64),)).of_grid(grid) is None


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_gguf_files_are_kept_as_codes(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """test_gguf.py compares their answers with transformers'."""
    model = build(TinyModel("llama", {**SHAPE, "tie_word_embeddings": True}))
    file = write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType[kind])
    caplog.set_level("INFO")
    load(model_store.locate(str(file)))
    layers = int(SHAPE["num_hidden_layers"])  # type: ignore[call-overload]
    assert f"{4 * layers + 1} linear layers keep the checkpoint's codes" in caplog.text


def test_the_embedded_model_answers_as_with_float32_weights(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_store.locate(model_store.EMBEDDED)
    caplog.set_level("INFO")
    coded = load(folder)
    assert "121 linear layers keep the checkpoint's codes" in caplog.text
    monkeypatch.setattr("baton.engine.weights.multiplies_exact_codes", lambda *_: False)
    assert answer(coded, PROMPT, 12) == answer(load(folder), PROMPT, 12)

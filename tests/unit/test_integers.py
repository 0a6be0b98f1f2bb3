"""Weights and rows as integer codes: products, whole models, and what is refused."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import get_args

import pytest
import torch
from emulated_tiles import emulated_dot, emulated_tiles
from engine_loop import load, serve
from rank_threads import split_engine
from tiny_models import TINY_MODELS, save
from torch import Tensor, nn

from baton.cluster.preflight import prepare
from baton.core.config import parse
from baton.core.errors import InvalidConfig
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.kernels.cpu import compiler, product
from baton.kernels.integers import (
    SCHEMES,
    IntegerWeight,
    integer_product,
    quantize_to_int4,
    quantize_to_int8,
    rotate,
)
from baton.kernels.linear import Activation, GatedLinear, Linear, RMSNorm, WeightCodes

ROWS = [1, 2, 3, 7, 8, 9, 16, 37]
SHAPES = [(32, 12), (96, 199), (160, 13), (576, 40), (4864, 64), (64, 3), (20, 24), (48, 16)]
"""(inputs, outputs); compiled code takes multiples of 32 inputs."""

DTYPES = [torch.float32, torch.bfloat16]
KINDS: list[WeightCodes] = ["int8", "int4"]
PROMPTS = [[(7 * at * at + at) % 199 for at in range(length)] for length in (1, 6, 70)]
ANSWER = 6


def hadamard(size: int) -> Tensor:
    """Of 1 and -1, in Sylvester's order."""
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), found)
    return found


def block_of(size: int) -> int:
    return next(each for each in (64, 32, 16, 8, 4, 2, 1) if size % each == 0)


def sizes_of(weight: Tensor) -> Tensor:
    """The power of two next to the root mean square of each input."""
    return torch.exp2((weight.float().square().mean(dim=0).log2() / 2).round())


def exactly(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """The definition, in float64: the greatest of each 128 balanced and rotated inputs of a row,
    and of an output, has code 127."""

    def rounded(some: Tensor) -> Tensor:
        peaks = some.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
        return torch.round(some * (torch.full_like(peaks, 127) / peaks)).double() * (
            peaks.double() / 127
        )

    rotated = (rotate(each, 64).split(128, dim=-1) for each in (x * sizes, weight / sizes))
    rows, outputs = (torch.cat([rounded(group) for group in each], dim=-1) for each in rotated)
    return rows @ outputs.mT / block_of(x.shape[-1])


def test_the_greatest_number_of_a_rotated_group_has_the_greatest_code() -> None:
    weight = torch.zeros(1, 256)
    weight[0, 3], weight[0, 130] = -2.0, 2.0**-10
    found = quantize_to_int8(weight)
    assert found.balance is not None
    assert found.balance[[0, 3, 130]].tolist() == [1, 2, 2.0**-10]
    assert found.codes[0, :8].tolist() == [-127, 127, 127, -127, -127, 127, 127, -127]
    assert found.codes[0, 64:128].eq(0).all()
    assert found.codes[0, 128:132].tolist() == [127, 127, -127, -127]
    assert (127 * 64 * found.scales).tolist() == [pytest.approx([1, 1])]


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-30, 1e-44])
def test_inputs_of_any_size_are_balanced(size: float) -> None:
    weight = torch.randn(100, 128)
    plain = quantize_to_int8(weight)
    weight[:, 7] = size
    found = quantize_to_int8(weight)
    assert found.balance is not None
    assert plain.balance is not None
    assert 0.5 <= found.balance[7] / max(size, 2.0**-126) <= 2
    assert found.balance[8:].equal(plain.balance[8:])
    assert bool(found.scales.isfinite().all())
    assert (127 * found.scales.amax()) < 64


@pytest.mark.parametrize("size", [1, 6, 32, 96, 576, 608])
def test_rows_are_rotated_by_a_hadamard_matrix(size: int) -> None:
    x, block = torch.randn(5, size), block_of(size)
    wanted = (x.unflatten(1, (-1, block)) @ hadamard(block)).flatten(1)
    assert torch.allclose(rotate(x, 64), wanted, atol=1e-4)
    assert torch.allclose(rotate(rotate(x, 64), 64), block * x, atol=1e-3)


@pytest.mark.parametrize("inputs", [16, 1024, 1040, 4096])
def test_products_are_as_defined(inputs: int) -> None:
    """Also of the greatest codes. Rotations of whole numbers are exact: none is next to the middle
    of two codes on one side only."""
    x, weight = torch.ones(3, inputs), torch.ones(5, inputs)
    x[1] = torch.randint(-99, 100, (inputs,))
    weight[2] = torch.randint(-99, 100, (inputs,))
    found = integer_product(x, quantize_to_int8(weight))
    # Terms cancel each other out; their sizes decide what float32's sums lose.
    sizes = x.abs().double() @ weight.abs().double().t()
    lost = (found.double() - exactly(x, weight, sizes_of(weight))).abs()
    assert bool((lost <= 1e-6 * sizes).all())


def test_a_group_of_int4_keeps_sixteen_equally_spaced_numbers() -> None:
    codes = torch.tensor([*range(-8, 8), *range(-8, 8)])
    weight = torch.stack((codes * 0.5, codes * -0.25 + 3, torch.full((32,), 0.7), codes * 0.0))
    found = quantize_to_int4(weight)
    assert found.codes[0].tolist() == codes.tolist()
    assert found.codes[1].tolist() == (-1 - codes).tolist()
    assert torch.allclose(numbers_of(found), weight, rtol=1e-6, atol=1e-6)


def test_a_group_of_int4_has_the_range_that_loses_least() -> None:
    weight = torch.randn(50, 320)
    found, groups = quantize_to_int4(weight), weight.unflatten(1, (-1, 32))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    whole = ((groups - least) / (most - least) * 15).round() / 15 * (most - least) + least
    kept = numbers_of(found).unflatten(1, (-1, 32))
    lost, lost_usually = ((each - groups).square().sum(dim=-1) for each in (kept, whole))
    assert found.codes.aminmax() == (-8, 7)
    assert bool((lost <= lost_usually * 1.0001).all())
    assert lost.sum() < 0.9 * lost_usually.sum()


def numbers_of(weight: IntegerWeight) -> Tensor:
    scales, offsets = (
        each.repeat_interleave(SCHEMES[weight.bits].group, dim=1)[:, : weight.codes.shape[1]]
        for each in (weight.scales, weight.offsets)
    )
    return weight.codes * scales + offsets


def test_products_of_int4_are_those_of_its_numbers() -> None:
    x, weight = torch.randn(7, 160), quantize_to_int4(torch.randn(13, 160) + 0.3)
    found = integer_product(x, weight)
    assert torch.allclose(found, x @ numbers_of(weight).t(), rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_compiled_products_have_the_bits_of_torchs(
    inputs: int, outputs: int, dtype: torch.dtype, biased: bool, kind: WeightCodes
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    plain, packed = Linear(weight, bias), Linear(weight, bias)
    for linear in (plain, packed):
        linear.quantize(kind)
        assert linear.weight.is_meta
    packed.pack()
    for rows in ROWS:
        x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
        x[-1] *= 0
        assert torch.equal(packed(x), plain(x))
        assert torch.equal(packed.add_to(residual, x), plain.add_to(residual, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_no_finite_result(number: float, kind: WeightCodes) -> None:
    """So that a broken model ends in an error, not in tokens."""
    linear = Linear(torch.randn(40, 608))
    linear.quantize(kind)
    linear.pack()
    x = torch.randn(len(ROWS), 608)
    plain = linear(x)
    for row in range(1, len(ROWS)):
        x[row, row * 75] = number
    found = linear(x)
    assert torch.equal(found[0], plain[0])
    assert not found[1:].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("registers", [compiler.NEON, compiler.AVX2, compiler.AVX512])
def test_code_without_dot_products_has_the_same_bits(
    registers: compiler.Registers,
    dtype: torch.dtype,
    kind: WeightCodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("has_dot", "has_byte_dot", "has_integer_amx"):
        monkeypatch.setattr(compiler, name, lambda: False)
    monkeypatch.setattr(compiler, "registers", lambda: registers)
    product.library.cache_clear()
    test_compiled_products_have_the_bits_of_torchs(608, 199, dtype, biased=False, kind=kind)
    product.library.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [False, True], ids=["vectors", "tiles"])
def test_code_for_unsigned_bytes_has_the_same_bits(
    tiles: bool, dtype: torch.dtype, kind: WeightCodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_tiles(monkeypatch, of_bytes=tiles):
        test_compiled_products_have_the_bits_of_torchs(608, 199, dtype, biased=True, kind=kind)
        test_gates_of_codes("silu", dtype, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_code_for_dot_products_of_arm_has_the_same_bits(
    dtype: torch.dtype, kind: WeightCodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_dot(monkeypatch):
        test_compiled_products_have_the_bits_of_torchs(608, 199, dtype, biased=True, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_of_codes(activation: Activation, dtype: torch.dtype, kind: WeightCodes) -> None:
    weight, bias = torch.randn(2 * 30, 96).to(dtype), torch.randn(60).to(dtype)
    norm = RMSNorm(torch.rand(96).to(dtype), 1e-5)
    packed, plain = GatedLinear(weight, bias, activation), GatedLinear(weight, bias, activation)
    for linear in (plain, packed):
        linear.quantize(kind)
    packed.pack()
    x = torch.randn(37, 96).to(dtype)
    found = packed(x, None)
    assert torch.allclose(found.float(), plain(x, None).float(), rtol=1e-2, atol=1e-3)
    normed = packed(x, norm)
    for row in range(len(x)):
        assert torch.equal(packed(x[row : row + 1], None), found[row : row + 1])
        assert torch.equal(packed(x[row : row + 1], norm), normed[row : row + 1])


class ExactLinear(nn.Module):
    def __init__(self, linear: nn.Linear, sizes: Tensor) -> None:
        super().__init__()
        self.linear, self.sizes = linear, sizes

    def forward(self, x: Tensor) -> Tensor:
        found = exactly(x, self.linear.weight, self.sizes)
        return (found if self.linear.bias is None else found + self.linear.bias).float()


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3", "gemma2", "phi3"])
def test_logits_are_transformers_with_the_same_codes(name: str, tmp_path: Path) -> None:
    """A number next to the middle of two of a row's 255 codes may get either, since norms differ in
    their last bits; that changes what follows. In most of these short prompts none is."""
    oracle = save(TINY_MODELS[name], tmp_path)
    for layer in oracle.model.layers:
        for part in (layer.self_attn, layer.mlp):
            linears = {
                key: module
                for key, module in part.named_children()
                if isinstance(module, nn.Linear)
            }
            # Weights of the same rows are one.
            last = {"o_proj", "down_proj"} & linears.keys()
            for some in (last, linears.keys() - last):
                sizes = sizes_of(torch.cat([linears[key].weight for key in some]).detach())
                for key in some:
                    setattr(part, key, ExactLinear(linears[key], sizes))
    head = oracle.lm_head.weight.detach()
    oracle.lm_head.weight = nn.Parameter(head.bfloat16().float())  # not the embedding's, if tied
    engine, differences = load(tmp_path, quantization="int8"), []
    for start in range(30):
        prompt = [(start * 31 + at * at * 7) % 199 for at in range(3)]
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt])).logits[0, :-1].double()
        wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        differences.append(float((prompt_logprobs(engine, prompt) - wanted).abs().max()))
    assert statistics.median(differences) < 1e-4
    assert max(differences) < 0.5


def prompt_logprobs(engine: Engine, prompt: list[int]) -> Tensor:
    key = AttemptKey("test", 0)
    work = Work(key, prompt, Sampling(), 1, frozenset(), prompt_logprobs=0)
    pages = engine.pool.pages_for(len(prompt) + 1)
    lease = engine.pool.acquire(pages)
    lease.cover(pages)
    sequence = Sequence(work, lease)
    engine.step({sequence: len(prompt)})
    lease.release()
    return torch.tensor([each.logprob for each in sequence.prompt_scores], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((each, "int8") for each in ("llama", "olmo2", "mixtral", "gpt-oss", "deepseek-v3")),
        *((each, "int4") for each in ("qwen3-moe", "gemma2")),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_do_not_depend_on_company(
    name: str, kind: WeightCodes, dtype: str, tmp_path: Path
) -> None:
    save(TINY_MODELS[name], tmp_path)
    options = {"dtype": dtype, "quantization": kind}
    together = serve(load(tmp_path, 4, **options), PROMPTS, ANSWER, chunk=7)
    engine = load(tmp_path, **options)
    assert together == [serve(engine, [each], ANSWER, chunk=64)[0] for each in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_quantize_their_parts(kind: WeightCodes, tmp_path: Path) -> None:
    save(TINY_MODELS["qwen3-moe"], tmp_path / "model")
    with split_engine(tmp_path / "model", 2, tmp_path, quantization=kind) as split:
        together = serve(split.engine, PROMPTS, ANSWER, chunk=7)
        assert together == [serve(split.engine, [each], ANSWER, chunk=64)[0] for each in PROMPTS]
        whole = load(tmp_path / "model", quantization=kind)
        assert split.engine.fingerprint != whole.fingerprint  # they exchange no pages


@pytest.mark.skipif(not compiler.available(), reason="needs compiled code: an Arm or x86_64 CPU")
@pytest.mark.parametrize(("kind", "most"), [("int8", 1.04), ("int4", 0.76)])
def test_codes_take_little_more_than_their_bits(kind: WeightCodes, most: float) -> None:
    linear = Linear(torch.randn(1200, 1600))
    linear.quantize(kind)
    linear.pack()
    assert linear._panels
    assert linear._panels._panels.nbytes < most * 1200 * 1600


def test_a_quantized_model_is_another(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engines = [load(tmp_path), *(load(tmp_path, quantization=kind) for kind in KINDS)]
    assert len({engine.fingerprint for engine in engines}) == 3


def test_models_through_transformers_are_not_quantized(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    with pytest.raises(InvalidConfig, match="through transformers cannot be quantized"):
        Engine.load(tmp_path, engine="transformers", quantization="int8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda", "dtype": "float32"}, "int8 on a GPU needs dtype bfloat16 or float16"),
        ({"engine": "transformers"}, "through transformers cannot be quantized"),
        ({"prefill": {"tensor_parallel": 2}}, "same tensor_parallel in both pools, not 2 and 1"),
    ],
)
def test_what_quantization_does_not_go_with_is_refused_before_the_start(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    config = parse({"model": str(tmp_path), "quantization": "int8", **changes})
    with pytest.raises(InvalidConfig, match=message):
        prepare(config)

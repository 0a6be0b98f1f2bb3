"""Sampling on the device: references against the engine's sampler, kernels against references."""

from __future__ import annotations

import math

import kernel_reference as reference
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.core.types import AttemptKey, Sampling, Work
from baton.engine import sampler
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.kernels.gpu.floors import load_weights
from baton.kernels.gpu.sampling import CAPACITY, LOG2_E, argmax, sample
from baton.kernels.noise import draw_key

POISON = -77


@triton.jit
def _weigh(logits, out, best, temperature, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    token = tl.arange(0, BLOCK)
    found = load_weights(logits, 0, best, LOG2_E / temperature, SIZE, BLOCK)
    tl.store(out + token, found, mask=token < SIZE)


def weigh(logits: Tensor, temperatures: Tensor) -> Tensor:
    """The weights that the sampling kernel sees."""
    out = torch.full(logits.shape, math.nan, device=logits.device)
    block = triton.next_power_of_2(logits.shape[1])
    for row, found, temperature in zip(logits, out, temperatures.tolist(), strict=True):
        best, divisor = float(row.max()), max(temperature, 1e-10)
        _weigh[(1,)](row, found, best, divisor, SIZE=logits.shape[1], BLOCK=block)
    return out


def random_logits(rows: int, size: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


class Settings:
    """Columns of a batch."""

    def __init__(self, samplings: list[Sampling], device: torch.device, seed: int = 0) -> None:
        self.temperatures = torch.tensor([s.temperature for s in samplings], device=device)
        self.top_k = torch.tensor([s.top_k for s in samplings], device=device, dtype=torch.int32)
        self.top_p = torch.tensor([s.top_p for s in samplings], device=device, dtype=torch.float64)
        self.min_p = torch.tensor([s.min_p for s in samplings], device=device)
        keys = [draw_key(seed, row) for row in range(len(samplings))]
        self.draw_keys = torch.tensor(keys, device=device)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.temperatures, self.top_k, self.top_p, self.min_p, self.draw_keys


def assert_drawn_as_by_the_reference(logits: Tensor, settings: Settings) -> None:
    """Exactly, given the kernel's own weights: its exp may differ from torch's in the last bit."""
    temperatures, *filters = settings.columns
    scores = logits.float()
    relative = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures.clamp(min=1e-10)[:, None]
    wanted = reference.draw(relative, weigh(logits, temperatures), *filters)
    found = torch.full_like(wanted, POISON)
    assert sample(logits, *settings.columns, found) is found
    assert found.tolist() == wanted.tolist()


KINDS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.3, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.99, top_k=300),
    Sampling(temperature=1.5, min_p=0.05),
    Sampling(temperature=2.0, top_p=0.95, top_k=20, min_p=0.01),
    Sampling(temperature=1.0, top_p=1e-12),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 80), (2, 5003), (9, 9000)])
def test_the_best_token_is_torchs(
    device: torch.device, dtype: torch.dtype, rows: int, size: int
) -> None:
    logits = random_logits(rows, size + 5, seed=size).to(device, dtype)[:, :size]
    out = torch.full((rows,), POISON, dtype=torch.int32, device=device)
    assert argmax(logits, out) is out
    assert out.tolist() == reference.argmax(logits).tolist()
    assert argmax(logits).tolist() == out.tolist()


@pytest.mark.parametrize("find", [argmax, reference.argmax])
def test_of_equals_the_lowest_token_is_the_best(find, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    logits = torch.full((2, 7000), -5.0, device=device)
    logits[0, [6999, 3000, 3001, 1500]] = 2.0
    logits[1] = -1.0
    logits[1, 4000] = -0.0
    logits[1, 5000] = 0.0
    assert find(logits).tolist() == [1500, 4000]


@pytest.mark.parametrize("find", [argmax, reference.argmax])
def test_a_row_that_is_not_sound_has_no_best_token(find, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    logits = random_logits(5, 3000, seed=1).to(device)
    logits[0, 2999] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, 0] = -math.nan
    logits[4, :2999] = -math.inf
    assert find(logits).tolist() == [-1, -1, -1, -1, 2999]


def test_the_reference_draws_what_the_engine_draws() -> None:
    cpu, pool = torch.device("cpu"), PagePool(0, 16)
    samplings = [Sampling(), Sampling(temperature=1.0, top_k=1), *KINDS] * 3
    logits = random_logits(len(samplings), 4099, seed=2)
    settings = Settings(samplings, cpu)
    sequences = []
    for row, one in enumerate(samplings):
        work = Work(AttemptKey("request", 0), (1,) * (row + 1), one, 100, frozenset())
        sequences.append(Sequence(work, pool.acquire(0), [1] * (row + 1)))
        settings.draw_keys[row] = draw_key(one.seed, row + 1)
    found = reference.sample(logits, *settings.columns).tolist()
    assert found == sampler.Sampler(4099).sample(logits, sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_the_references_but_for_the_last_bits(
    device: torch.device, dtype: torch.dtype
) -> None:
    logits = random_logits(4, 3001, seed=3).to(device, dtype)
    temperatures = torch.tensor([0.3, 1.0, 1e-20, 100.0], device=device)
    wanted = reference.weigh(logits, temperatures)
    torch.testing.assert_close(weigh(logits, temperatures), wanted, rtol=1e-5, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 50, 4096, 9001])
def test_draws_are_the_references(device: torch.device, dtype: torch.dtype, size: int) -> None:
    wide = random_logits(len(KINDS), size + 3, seed=size).to(device, dtype)
    assert_drawn_as_by_the_reference(wide[:, :size], Settings(KINDS, device, seed=size))


def test_the_kept_tokens_are_the_references(device: torch.device) -> None:
    samplings = [
        Sampling(temperature=1.0, top_k=300),
        Sampling(temperature=1.0, top_k=6000),
        Sampling(temperature=1.0, top_p=0.99),
        Sampling(temperature=50.0, top_p=0.5),
        Sampling(temperature=1.0, top_k=6000, top_p=0.999),
        Sampling(temperature=1.0, min_p=0.001),
    ]
    logits = random_logits(len(samplings), 10001, seed=8).sort(descending=True).values
    assert_drawn_as_by_the_reference(logits.to(device), Settings(samplings, device))


def test_the_last_kept_token_is_drawn_and_none_behind_it(device: torch.device) -> None:
    logits = torch.linspace(1.0, 0.0, 40, device=device).expand(30, -1)
    settings = Settings([Sampling(temperature=100.0, top_k=5)] * 30, device)
    assert set(sample(logits, *settings.columns).tolist()) == {0, 1, 2, 3, 4}


def test_narrow_shares_do_as_well(device: torch.device) -> None:
    settings = Settings(KINDS, device)
    settings.top_p = settings.top_p.float()
    assert_drawn_as_by_the_reference(random_logits(len(KINDS), 500, seed=4).to(device), settings)


def test_more_equal_weights_than_registers_hold_are_kept_whole(device: torch.device) -> None:
    """The search ends with passes over the row alone."""
    size = 2 * CAPACITY + 100
    logits = torch.zeros(4, size, device=device)
    logits[:, 7] = 1.0
    samplings = [
        Sampling(temperature=1.0, top_k=2),
        Sampling(temperature=1.0, top_p=0.5),
        Sampling(temperature=1.0, top_k=2, top_p=0.9),
        Sampling(temperature=1.0, top_k=size - 1, min_p=0.9),
    ]
    assert_drawn_as_by_the_reference(logits, Settings(samplings, device, seed=5))


def test_a_tie_at_the_border_is_drawn_whole(device: torch.device) -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]], device=device).expand(24, -1)
    settings = Settings([Sampling(temperature=5.0, top_k=2)] * 24, device)
    assert set(sample(logits, *settings.columns).tolist()) == {0, 1, 2}


def test_only_possible_tokens_are_drawn(device: torch.device) -> None:
    logits = torch.full((50, 10000), -math.inf, device=device)
    logits[:, 100:102] = 2.0
    logits[25:, 9899] = 2.0
    settings = Settings([Sampling(temperature=1.0)] * 50, device)
    drawn = sample(logits, *settings.columns).tolist()
    assert set(drawn[:25]) == {100, 101}
    assert set(drawn[25:]) == {100, 101, 9899}


def test_each_row_goes_by_its_own_settings(device: torch.device) -> None:
    """Rows that draw, rows that take the best and rows that are not sound, side by side."""
    samplings = [Sampling(), KINDS[3], Sampling(1.0, top_k=1), Sampling(1e-30), KINDS[1]]
    logits = random_logits(5, 3000, seed=6).to(device)
    logits[4, 17] = math.nan
    settings = Settings(samplings, device)
    found = sample(logits, *settings.columns).tolist()
    best = reference.argmax(logits).tolist()
    drawn = reference.sample(logits[1:2], *(column[1:2] for column in settings.columns))
    assert found == [best[0], int(drawn), best[2], best[3], -1]

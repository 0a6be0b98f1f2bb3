"""The sampler against transformers' logits processors and against the softmax."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.core.errors import Internal
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.page_pool import PagePool
from baton.engine.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.kernels.noise import add_noise, draw_key

POOL = PagePool(0, 16)
DRAWS = 4000


def sequence(
    sampling: Sampling, prompt: tuple[int, ...] = (1,), answer: tuple[int, ...] = ()
) -> Sequence:
    work = Work(AttemptKey("request", 0), prompt, sampling, 100, frozenset())
    return Sequence(work, POOL.acquire(0), [*prompt, *answer])


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def draws(logits: Tensor, count: int, **settings: object) -> Counter[int]:
    """Tokens drawn from one row of logits with `count` different seeds."""
    sequences = [sequence(Sampling(seed=seed, **settings)) for seed in range(count)]  # type: ignore[arg-type]
    return Counter(Sampler(logits.shape[-1]).sample(logits.expand(count, -1), sequences))


def expected(logits: Tensor, *processors: LogitsProcessor) -> Tensor:
    """The distribution that transformers would draw from. logits: [V] -> [V]"""
    scores = logits[None].float()
    for processor in processors:
        scores = processor(torch.tensor([[1]]), scores)
    return scores[0].double().softmax(dim=-1)


def assert_drawn_from(counts: Counter[int], probabilities: Tensor) -> None:
    """A chi-square test with a bound that a right sampler passes 9,999 times in 10,000."""
    total = counts.total()
    allowed = probabilities.nonzero()[:, 0].tolist()
    assert set(counts) <= set(allowed)
    statistic = sum(
        (counts[token] - total * p) ** 2 / (total * p)
        for token in allowed
        if (p := float(probabilities[token])) > 0
    )
    freedom = len(allowed) - 1
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


def test_greedy_takes_the_argmax() -> None:
    logits = random_logits(5, 1000)
    tokens = Sampler(1000).sample(logits, [sequence(Sampling())] * 5)
    assert tokens == logits.argmax(dim=-1).tolist()


def test_of_equal_logits_greedy_takes_the_lowest_id() -> None:
    assert Sampler(4).sample(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), [sequence(Sampling())]) == [1]


def test_an_empty_batch_samples_nothing() -> None:
    assert Sampler(4).sample(torch.empty(0, 4), []) == []


def test_padding_beyond_the_vocabulary_is_never_sampled() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 9.0]] * 2)
    sequences = [sequence(Sampling()), sequence(Sampling(temperature=1.0))]
    assert max(Sampler(2).sample(logits, sequences)) < 2


def test_draws_follow_the_softmax() -> None:
    logits = random_logits(1, 12)[0]
    assert_drawn_from(draws(logits, DRAWS, temperature=1.0), expected(logits))


def test_draws_follow_the_softmax_along_one_answer() -> None:
    logits = random_logits(1, 12, seed=1)
    current = sequence(Sampling(temperature=1.0, seed=7))
    for _ in range(1000):
        current.append(Sampler(12).sample(logits, [current])[0])
    assert_drawn_from(Counter(current.tokens[1:]), expected(logits[0]))


def test_temperature_flattens_or_sharpens() -> None:
    logits = random_logits(1, 12, seed=2)[0]
    for temperature in (0.5, 3.0):
        counts = draws(logits, DRAWS, temperature=temperature)
        assert_drawn_from(counts, expected(logits, TemperatureLogitsWarper(temperature)))


def test_top_k_keeps_what_transformers_keeps() -> None:
    logits = random_logits(1, 50, seed=3)[0]
    counts = draws(logits, DRAWS, temperature=2.0, top_k=7)
    wanted = expected(logits, TemperatureLogitsWarper(2.0), TopKLogitsWarper(7))
    assert len(counts) == 7
    assert_drawn_from(counts, wanted)


def test_top_p_keeps_what_transformers_keeps() -> None:
    logits = random_logits(1, 50, seed=4)[0]
    for top_p in (0.5, 0.9):
        counts = draws(logits, DRAWS, temperature=2.0, top_p=top_p)
        wanted = expected(logits, TemperatureLogitsWarper(2.0), TopPLogitsWarper(top_p))
        assert_drawn_from(counts, wanted)


def test_min_p_keeps_what_transformers_keeps() -> None:
    logits = random_logits(1, 50, seed=5)[0]
    counts = draws(logits, DRAWS, temperature=2.0, min_p=0.1)
    assert_drawn_from(counts, expected(logits, TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.1)))


def test_all_filters_together_keep_what_transformers_keeps() -> None:
    logits = random_logits(1, 50, seed=6)[0]
    counts = draws(logits, DRAWS, temperature=3.0, top_k=20, top_p=0.8, min_p=0.2)
    filters = (TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.2))
    assert_drawn_from(counts, expected(logits, TemperatureLogitsWarper(3.0), *filters))


def test_a_nucleus_wider_than_the_first_look_is_found_by_sorting() -> None:
    logits = random_logits(1, 5000, seed=7)[0] / 10
    kept = set(expected(logits, TopPLogitsWarper(0.5)).nonzero()[:, 0].tolist())
    assert len(kept) > 1024
    assert set(draws(logits, 500, temperature=1.0, top_p=0.5)) <= kept


def test_a_tie_at_the_border_of_top_k_is_kept_whole() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 0.0])
    assert set(draws(logits, 500, temperature=5.0, top_k=2)) == {0, 1, 2}


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.tensor([1.0, 1.0, 0.0])
    assert set(draws(logits, 50, temperature=5.0, top_k=1)) == {0}


def test_a_tiny_top_p_leaves_the_best_token() -> None:
    logits = random_logits(1, 50, seed=8)[0]
    assert set(draws(logits, 50, temperature=5.0, top_p=1e-9)) == {int(logits.argmax())}


def test_the_repetition_penalty_is_transformers() -> None:
    logits = random_logits(1, 20, seed=9)
    prompt, answer = (3, 3, 5), (7, 8, 8)
    oracle = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    wanted = oracle(torch.tensor([[*prompt, *answer]]), logits.clone())
    samplings = [Sampling(1.0, repetition_penalty=1.7, seed=seed) for seed in range(DRAWS)]
    sequences = [sequence(sampling, prompt, answer) for sampling in samplings]
    drawn = Sampler(20).sample(logits.expand(DRAWS, -1), sequences)
    assert_drawn_from(Counter(drawn), wanted[0].double().softmax(dim=-1))


def test_greedy_takes_the_best_after_penalties() -> None:
    penalized = sequence(Sampling(repetition_penalty=2.0), prompt=(0,))
    assert Sampler(3).sample(torch.tensor([[1.9, 1.0, 0.9]]), [penalized]) == [1]


def test_a_continued_answer_is_sampled_as_if_it_had_never_stopped() -> None:
    """Another attempt reads what was answered as part of its prompt."""
    settings = {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    logits = random_logits(1, 20)
    for seed in range(50):
        sampling = Sampling(seed=seed, **settings)
        whole = sequence(sampling, (1, 2), (3, 4, 3))
        work = Work(AttemptKey("r", 2), (1, 2, 3, 4, 3), sampling, 100, frozenset(), 3)
        continued = Sequence(work, POOL.acquire(0))
        assert continued.generated == whole.generated == 3
        assert Sampler(20).sample(logits, [continued]) == Sampler(20).sample(logits, [whole])


def test_presence_counts_once_and_frequency_each_time_and_the_prompt_not_at_all() -> None:
    def best(logits: list[float], **penalties: float) -> int:
        one = sequence(Sampling(**penalties), prompt=(0, 0, 0), answer=(1, 1, 2))  # type: ignore[arg-type]
        return Sampler(4).sample(torch.tensor([logits]), [one])[0]

    # Token 1 occurs twice in the answer, token 2 once, token 0 in the prompt only.
    assert best([1.0, 1.9, 0.0, 0.0], presence_penalty=0.8) == 1
    assert best([1.0, 1.7, 0.0, 0.0], presence_penalty=0.8) == 0
    assert best([1.0, 2.7, 0.0, 0.0], frequency_penalty=0.8) == 1
    assert best([1.0, 2.5, 0.0, 0.0], frequency_penalty=0.8) == 0
    assert best([1.0, 0.0, 1.7, 0.0], frequency_penalty=0.8) == 0
    assert best([0.0, 0.0, 0.0, 0.9], presence_penalty=-1.0) == 1


def test_a_bias_is_added_to_the_logits_after_the_penalties() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    biased = Sampling(logit_bias=((0, -100.0), (2, 0.5)))
    assert Sampler(3).sample(logits, [sequence(biased)]) == [1]
    halved = replace(biased, repetition_penalty=4.0, logit_bias=((1, 0.3),))
    assert Sampler(3).sample(logits, [sequence(halved, prompt=(0, 1))]) == [1]


def test_biases_move_the_odds_as_they_move_the_logits() -> None:
    logits = random_logits(1, 12, seed=13)[0]
    biases = ((3, 2.0), (7, -1.5), (11, -100.0))
    moved = logits.clone()
    for token, bias in biases:
        moved[token] += bias
    assert_drawn_from(draws(logits, DRAWS, temperature=1.0, logit_bias=biases), expected(moved))


def test_an_answer_not_yet_begun_has_no_penalties() -> None:
    logits = torch.tensor([[1.0, 0.9]])
    assert Sampler(2).sample(logits, [sequence(Sampling(frequency_penalty=2.0), (0,))]) == [0]


def mixed_batch(size: int) -> list[Sequence]:
    """Sequences of every kind of sampling, each with a seed and an answer of its own."""
    kinds = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=40),
        Sampling(temperature=1.3, top_p=0.9),
        Sampling(temperature=1.0, top_p=0.99, top_k=300),
        Sampling(temperature=1.5, min_p=0.05),
        Sampling(repetition_penalty=1.2),
        Sampling(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.5),
    ]
    return [
        sequence(replace(kinds[row % len(kinds)], seed=row), (1, 2, 3), tuple(range(row)))
        for row in range(size)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_samples_the_same_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    logits = random_logits(24, 4099, seed=10).to(dtype)
    batch = mixed_batch(24)
    sampler = Sampler(4099)
    alone = [sampler.sample(logits[row : row + 1], [batch[row]])[0] for row in range(24)]
    assert sampler.sample(logits, batch) == alone
    turned = sampler.sample(logits.flip(0), batch[::-1])
    assert turned == alone[::-1]


def test_sampling_leaves_the_logits_as_they_are() -> None:
    logits = random_logits(24, 100, seed=11)
    before = logits.clone()
    Sampler(100).sample(logits, mixed_batch(24))
    assert torch.equal(logits, before)


def test_tokens_ruled_out_by_the_logits_are_never_drawn() -> None:
    logits = torch.full((8,), -math.inf)
    logits[[2, 5]] = torch.tensor([0.0, 1.0])
    assert set(draws(logits, 300, temperature=1.0, top_k=5, top_p=0.999)) == {2, 5}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures_draw_sound_tokens(temperature: float) -> None:
    logits = torch.tensor([-1e4, 3e4, 2.9e4, -math.inf])
    drawn = set(draws(logits, 200, temperature=temperature))
    assert drawn == ({0, 1, 2} if temperature > 1 else {1})


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
@pytest.mark.parametrize("broken", [[1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_broken_logits_raise(sampling: Sampling, broken: list[float]) -> None:
    logits = torch.tensor([[1.0, 2.0], broken])
    with pytest.raises(Internal, match="not finite"):
        Sampler(2).sample(logits, [sequence(sampling)] * 2)


def noise(keys: list[int], size: int) -> Tensor:
    return add_noise(torch.zeros(len(keys), size), torch.tensor(keys))


def test_seed_position_and_token_each_change_the_noise() -> None:
    seeds = {draw_key(seed, 5) for seed in (-1, 0, 1, 2, 2**63, 2**64 - 2)}
    positions = {draw_key(5, position) for position in range(1000)}
    assert len(seeds) == 6
    assert len(positions) == 1000
    assert len(noise([draw_key(5, 5)], 1000)[0].unique()) == 1000


def test_winners_are_uniform_over_tokens_for_all_seeds_and_positions() -> None:
    flat = torch.full((64,), 1 / 64)
    for keys in ([draw_key(s, 3) for s in range(20000)], [draw_key(3, p) for p in range(20000)]):
        assert_drawn_from(Counter(noise(keys, 64).argmax(dim=-1).tolist()), flat)


def test_noise_has_the_gumbel_distribution() -> None:
    values = noise([draw_key(s, 1) for s in range(100)], 5000).double()
    shares = torch.exp(-torch.exp(-values)).flatten()  # uniform, if the noise is Gumbel's
    counts = Counter((shares * 64).long().tolist())
    assert_drawn_from(counts, torch.full((64,), 1 / 64))


def test_neighbouring_tokens_seeds_and_positions_are_independent() -> None:
    by_seed = noise([draw_key(s, 7) for s in range(2000)], 100)
    by_position = noise([draw_key(7, p) for p in range(2000)], 100)
    for values in (by_seed[1:] - by_seed[:-1], by_position[1:] - by_position[:-1]):
        assert abs(float((values**2).mean()) / (2 * math.pi**2 / 6) - 1.0) < 0.03
    gaps = by_seed[:, 1:] - by_seed[:, :-1]
    assert abs(float((gaps**2).mean()) / (2 * math.pi**2 / 6) - 1.0) < 0.03


def test_keys_are_the_published_generators() -> None:
    # SplitMix64's first two outputs from state 0, as its author's program prints them.
    assert draw_key(0, 0) % 2**64 == 0xE220A8397B1DCDAF
    assert draw_key(0, 1) % 2**64 == 0x6E789E6AA1B965F4


def test_the_noise_is_made_of_32_bit_words() -> None:
    """Computed again with whole numbers, token by token."""

    def one(key: int, token: int) -> float:
        word = (token * 0x9E3779B9 + key) % 2**32
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32 ^ (key >> 32) % 2**32
        word = (word ^ word >> 15) * 0x846CA68B % 2**32
        share = min((((word ^ word >> 16) >> 1) + 0.5) * 2.0**-31, 1.0 - 2.0**-24)
        return -math.log(-math.log1p(-share))

    keys = [draw_key(seed, 11) for seed in (0, 1, -1, 2**63, 12345)]
    wanted = torch.tensor([[one(key, token) for token in range(300)] for key in keys])
    torch.testing.assert_close(noise(keys, 300), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drift", [1e-6, 1e-3])
def test_a_small_drift_of_the_logits_changes_few_tokens(drift: float) -> None:
    """About as many as the distributions differ; drawing by a walk over the weights would change
    the token wherever any border before it has moved across the draw."""
    logits = random_logits(1, 4000, seed=3).expand(4000, -1)
    drifted = logits + drift * torch.randn(4000, 4000, generator=torch.Generator().manual_seed(4))
    sequences = [sequence(Sampling(temperature=1.0, seed=seed)) for seed in range(4000)]
    sampler = Sampler(4000)
    pairs = zip(sampler.sample(logits, sequences), sampler.sample(drifted, sequences), strict=True)
    assert sum(before != after for before, after in pairs) <= max(8 * drift * 4000, 2)

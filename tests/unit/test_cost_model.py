from __future__ import annotations

import random

import pytest

from baton.core.types import Role
from baton.router.placement.cost_model import KNOWN_AFTER, CostModel, Costs


def test_before_any_measurement_more_work_takes_longer() -> None:
    costs = CostModel().costs
    assert costs == Costs()
    assert costs.prefill.seconds(200, 0) > costs.prefill.seconds(100, 100) > 0
    assert costs.prefill.seconds(100, 4000) > costs.prefill.seconds(100, 0)
    assert costs.prefill.seconds(100, 0, 200) > costs.prefill.seconds(100, 0, 100)
    assert costs.step_seconds(5, 50) > costs.step_seconds(4, 50) > costs.step_seconds(4, 40)
    assert costs.transfer_seconds(2000) > costs.transfer_seconds(1000)
    assert costs.transfer_seconds(0) == 0.0


def test_prefill_is_predicted_from_what_was_measured() -> None:
    model, draw = CostModel(), random.Random(1)
    for _ in range(100):
        tokens = draw.randint(10, 1000)
        pending = draw.choice([0, 0, 300, 2000])
        model.note_prompt(Role.PREFILL, tokens, 0, pending, 0.002 * tokens + 0.001 * pending)
    assert model.costs.prefill.seconds(500, 0) == pytest.approx(1.0, rel=0.1)
    assert model.costs.prefill.seconds(500, 0, 1000) == pytest.approx(2.0, rel=0.1)


def test_what_it_takes_to_bring_tokens_back_is_learned() -> None:
    model, draw = CostModel(), random.Random(1)
    for _ in range(100):
        tokens, restored = draw.randint(10, 1000), draw.choice([0, 200, 2000])
        seconds = 0.002 * tokens + 0.0005 * restored
        model.note_prompt(Role.PREFILL, tokens, restored, 0, seconds, restored)
    costs = model.costs
    without, with_them = costs.prefill.seconds(100, 1000), costs.prefill.seconds(100, 1000, 0, 1000)
    assert with_them - without == pytest.approx(0.5, rel=0.2)


def test_empty_queues_say_nothing_of_full_ones() -> None:
    model = CostModel()
    for _ in range(100):
        model.note_prompt(Role.PREFILL, 100, 0, 0, 1.0)
    assert 5.0 < model.costs.prefill.seconds(100, 0, 1000) < 20.0
    model.note_prompt(Role.PREFILL, 100, 0, 1000, 11.0)
    assert model.costs.prefill.seconds(100, 0) == pytest.approx(1.0, rel=0.1)


def test_until_a_decode_worker_has_read_a_prompt_it_is_as_fast_as_prefill() -> None:
    model = CostModel()
    model.note_prompt(Role.PREFILL, 100, 0, 0, 2.0)
    assert model.costs.local.seconds(100, 0) == pytest.approx(2.0, rel=0.01)
    model.note_prompt(Role.DECODE, 100, 0, 0, 4.0)
    assert model.costs.local.seconds(100, 0) == pytest.approx(4.0, rel=0.01)
    assert model.costs.prefill.seconds(100, 0) == pytest.approx(2.0, rel=0.01)


def test_until_a_prefill_worker_has_read_a_prompt_it_is_as_fast_as_decode() -> None:
    model = CostModel()
    model.note_prompt(Role.DECODE, 100, 0, 0, 4.0)
    assert model.costs.prefill.seconds(100, 0) == pytest.approx(4.0, rel=0.01)
    assert model.costs.prefill.seconds(100, 0) > model.costs.local.seconds(20, 80)
    model.note_prompt(Role.PREFILL, 100, 0, 0, 2.0)
    assert model.costs.prefill.seconds(100, 0) == pytest.approx(2.0, rel=0.01)
    assert model.costs.local.seconds(100, 0) == pytest.approx(4.0, rel=0.01)


def test_until_one_was_made_a_fetch_is_a_push_that_waits_for_a_step() -> None:
    model = CostModel()
    model.note_push(10**6, 2.0, 0.0, 9.0)
    model.note_step(1, 0, 0, 1.0)
    push, step = model.costs.transfer_seconds(10**6), model.costs.step[0]
    assert model.costs.fetch_seconds(10**6) == pytest.approx(push + step)
    for _ in range(50):
        model.note_fetch(10**6, 0.5)
    assert model.costs.fetch_seconds(10**6) == pytest.approx(0.5, rel=0.1)
    assert model.costs.transfer_seconds(10**6) == pytest.approx(2.0, rel=0.01)


def test_only_what_compute_cannot_hide_of_a_transfer_is_waited_for() -> None:
    model = CostModel()
    for size in (10**6, 10**7, 10**8) * 10:
        model.note_push(size, size / 1e8, max(0.0, size / 1e8 - 0.2), 0.2)
    costs = model.costs
    long, short = costs.transfer_seconds(10**8), costs.transfer_seconds(10**7)
    assert costs.exposed_seconds(long, 0.2) == pytest.approx(0.8, rel=0.2)
    assert costs.exposed_seconds(short, 0.2) < 0.02
    assert costs.exposed_seconds(long, 0.0) > costs.exposed_seconds(long, 0.5)


def test_a_busy_decode_worker_costs_the_answer_and_its_neighbours() -> None:
    model, draw = CostModel(), random.Random(1)
    for _ in range(500):
        requests, pages = draw.randint(1, 20), draw.randint(10, 500)
        model.note_step(requests, pages, 0, 0.02 + 0.002 * requests + 1e-5 * pages)
    model.note_answer(128)
    costs = model.costs
    assert costs.step_seconds(10, 100) == pytest.approx(0.041, rel=0.1)
    lone, busy = (costs.decode_seconds(100, requests, 100, 10) for requests in (0, 10))
    assert lone == pytest.approx(100 * 0.023, rel=0.1)
    assert busy == pytest.approx(100 * (0.043 + 10 * 0.0021), rel=0.15)


def test_an_answer_takes_no_more_tokens_than_are_wanted() -> None:
    model = CostModel()
    for _ in range(200):
        model.note_answer(1000)
    short, long, longer = (model.costs.decode_seconds(n, 0, 0, 1) for n in (10, 1000, 5000))
    assert short < long / 50
    assert longer == pytest.approx(long, rel=0.05)


@pytest.mark.parametrize(("slowdown", "share"), [(0.0, 0.0), (0.03, 0.5)])
def test_prefill_disturbs_decode_as_far_as_was_seen(slowdown: float, share: float) -> None:
    model, draw = CostModel(), random.Random(1)
    for _ in range(500):
        busy = draw.randint(0, 1)
        model.note_step(4, 100, busy, 0.03 + slowdown * busy)
    # Four requests, each of which a second of prefill takes so much of.
    assert model.costs.interference(4) == pytest.approx(4 * share, abs=0.3)


def test_steps_that_stand_still_for_a_prompt_count_with_their_seconds() -> None:
    model = CostModel()
    for _ in range(30):
        for _ in range(9):
            model.note_step(4, 100, 0.0, 0.05)
        model.note_step(4, 100, 1.0, 2.0)  # an outlier to a fit of steps
    assert model.costs.step_seconds(4, 100) == pytest.approx(0.05, rel=0.2)
    assert model.costs.interference(1) > 0.9


def test_what_has_not_been_measured_for_long_is_taken_to_cost_what_the_other_does() -> None:
    model = CostModel()
    model.note_prompt(Role.DECODE, 100, 0, 0, 30.0)
    for _ in range(2000):
        model.note_prompt(Role.PREFILL, 100, 0, 0, 2.0)
    assert model.costs.local.seconds(100, 0) == pytest.approx(2.0, rel=0.05)
    model.note_prompt(Role.DECODE, 100, 0, 0, 20.0)
    assert model.costs.local.seconds(100, 0) > 10.0


def test_prompts_read_beside_busy_prefill_workers_say_what_they_take_alone() -> None:
    model, draw = CostModel(), random.Random(1)
    for _ in range(200):
        tokens, busy = draw.randint(10, 500), draw.random() * 2
        model.note_prompt(Role.DECODE, tokens, 0, 0, tokens * (0.002 + 0.004 * busy), 0, busy)
    assert model.costs.local.seconds(200, 0) == pytest.approx(0.4, rel=0.25)
    assert model.costs.interference(0, 3) == pytest.approx(3 * 2 / 3, rel=0.15)


def test_few_answers_and_steps_say_nothing_of_how_long_an_answer_takes() -> None:
    model = CostModel()
    for number in range(1, KNOWN_AFTER + 1):
        assert not model.costs.knows_answers
        model.note_answer(14)
        model.note_step(1, 1, 0.0, 1.0 if number == 1 else 0.01)
    assert model.costs.knows_answers

"""Several answers to one request, on the embedded model's first layers."""

from __future__ import annotations

import pytest
from processes import ProcessCluster, scrape

import baton
from baton.core import metrics
from baton.request_builder import GenerateOptions

PROMPT = "Three words about the sea:"
SAMPLED: GenerateOptions = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True}


def test_each_answer_is_the_one_that_its_seed_gives_alone(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client:
        together = client.generate(PROMPT, n=3, **SAMPLED)
        for choice in together.choices:
            alone = client.generate(PROMPT, **{**SAMPLED, "seed": choice.seed})
            assert (choice.text, choice.token_ids) == (alone.text, alone.token_ids)
    assert len({choice.text for choice in together.choices}) == 3
    assert together.seed == together.choices[0].seed == 11
    assert together.usage.completion_tokens == 36


def test_greedy_answers_are_all_the_same(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client:
        answer = client.generate(PROMPT, n=2, max_tokens=6, ignore_eos=True)
    first, second = answer.choices
    assert first.token_ids == second.token_ids


def test_a_stop_string_ends_the_answer_that_has_it_and_no_other(
    shallow_idle: ProcessCluster,
) -> None:
    with shallow_idle.client() as client:
        whole = client.generate(PROMPT, n=3, **SAMPLED)
        texts = [choice.text for choice in whole.choices]
        stop = next(text[4:] for text in texts if sum(text[4:] in other for other in texts) == 1)
        stopped = client.generate(PROMPT, n=3, stop=stop, **SAMPLED)
    assert [choice.text for choice in stopped.choices] == [
        text.partition(stop)[0] for text in texts
    ]
    assert sorted(choice.stop for choice in stopped.choices) == ["", "", stop]


def test_cancelling_frees_every_answer(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client, client.stream(PROMPT, n=4, ignore_eos=True) as stream:
        seen: set[int] = set()
        while len(seen) < 4:
            seen.add(next(stream).index)
        assert client.status().active_requests == 4
    shallow_idle.wait_idle()


def test_more_answers_than_there_may_be_are_refused(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client, pytest.raises(baton.InvalidRequest) as refused:
        client.generate(PROMPT, n=17)
    assert (refused.value.message, refused.value.field) == ("n must be 1 to 16, not 17", "n")


def test_the_prompt_counts_once_and_every_answer_has_its_times(
    shallow_idle: ProcessCluster,
) -> None:
    before = scrape(shallow_idle.metrics)
    with shallow_idle.client() as client:
        answer = client.generate(PROMPT, n=2, **SAMPLED)
    after = scrape(shallow_idle.metrics)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown[metrics.REQUESTS] == 1
    assert grown[metrics.PROMPT_TOKENS] == answer.usage.prompt_tokens
    assert grown[metrics.GENERATION_TOKENS] == answer.usage.completion_tokens == 24
    assert grown[f"{metrics.TTFT_SECONDS}_count"] == 2
    assert grown[f"{metrics.E2E_SECONDS}_count"] == 2

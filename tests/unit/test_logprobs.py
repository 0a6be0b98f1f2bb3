"""How likely sampled tokens were: the engine against transformers, the GPU's path against it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_loop import load
from test_gpu_runner import begin, runner_for
from tiny_models import TINY_MODELS, VOCABULARY, save

from baton.core.types import AttemptKey, Logprobs, Sampling, Work
from baton.core.wire import logprobs_from, logprobs_to, work_from, work_to
from baton.engine.engine import Engine
from baton.engine.logprobs import LEAST, score
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Scored

PROMPT = [5, 3, 8, 120, 44]
WARM = Sampling(temperature=0.8, top_k=40, repetition_penalty=1.3, seed=4)


def sequence(engine: Engine, sampling: Sampling, logprobs: int | None, answer: int) -> Sequence:
    work = Work(AttemptKey("r", 1), PROMPT, sampling, answer, frozenset(), logprobs=logprobs)
    return Sequence(work, engine.pool.acquire(engine.pool.pages_for(len(PROMPT) + answer)))


def test_probabilities_are_transformers_whatever_changes_the_choice(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama"], tmp_path)
    engine = load(tmp_path)
    asking = [sequence(engine, Sampling(), 0, 8), sequence(engine, WARM, 5, 8)]
    silent = sequence(engine, Sampling(), None, 8)
    told: list[list[Logprobs]] = [[], []]
    for _ in range(8):
        plan = {each: each.uncomputed for each in (silent, *asking)}
        token, *scored = engine.step(plan)
        assert isinstance(token, int)
        silent.append(token)
        for each, outcome, kept in zip(asking, scored, told, strict=True):
            assert isinstance(outcome, Scored)
            each.append(outcome.token)
            kept.append(outcome.logprobs)
    for each, kept, wanted in zip(asking, told, (0, 5), strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([each.tokens])).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.double().log_softmax(dim=-1)
        chosen = expected.gather(1, torch.tensor(each.tokens[len(PROMPT) :])[:, None])[:, 0]
        assert [one.logprob for one in kept] == pytest.approx(chosen.tolist(), abs=1e-4)
        best = expected.topk(wanted)
        assert [list(one.top_token_ids) for one in kept] == best.indices.tolist()
        for one, values in zip(kept, best.values.tolist(), strict=True):
            assert list(one.top_logprobs) == pytest.approx(values, abs=1e-4)


def test_a_gpu_tells_what_a_cpu_tells(device: torch.device, tmp_path: Path) -> None:
    save(TINY_MODELS["qwen3"], tmp_path)
    told, prompts = [], []
    for runner in (runner_for(tmp_path, None), runner_for(tmp_path, device)):
        pool = PagePool(64, 4)
        plan = {}
        for length, wanted in ((3, 2), (4, None), (6, 0)):
            made = begin(pool, PROMPT[:1] * length, 2, wanted)
            made.work = replace(made.work, prompt_logprobs=wanted)
            plan[made] = length
        told.append(runner.launch(plan).wait())
        prompts.append([each for sequence in plan for each in sequence.prompt_scores])
    (first, second, third), wanted_outcomes = told[1], told[0]
    assert len(prompts[0]) == len(prompts[1]) == 7
    for here, there in zip(*prompts, strict=True):
        assert here.top_token_ids == there.top_token_ids
        assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
    assert isinstance(first, Scored)
    assert isinstance(second, int)
    assert isinstance(third, Scored)
    for found, expected in zip((first, third), wanted_outcomes[::2], strict=True):
        assert isinstance(expected, Scored)
        assert found.token == expected.token
        assert found.logprobs.top_token_ids == expected.logprobs.top_token_ids
        numbers = (found.logprobs.logprob, *found.logprobs.top_logprobs)
        others = (expected.logprobs.logprob, *expected.logprobs.top_logprobs)
        assert numbers == pytest.approx(others, abs=1e-4)


def test_what_cannot_be_is_a_number_too() -> None:
    work = Work(AttemptKey("r", 1), [1], Sampling(), 9, frozenset(), logprobs=3)
    logits = torch.tensor([[0.0, -math.inf]])
    (scores,) = score(logits, [0], [Sequence(work, PagePool(0, 4).acquire(0))])
    ((_, scored),) = scores.by_row()
    assert scored.logprobs == Logprobs(0.0, (0, 1), (0.0, LEAST))


def test_many_rows_are_scored_in_groups_that_know_their_places() -> None:
    sequences = []
    for row in range(100):
        work = Work(AttemptKey("r", 1), [1], Sampling(), 9, frozenset(), logprobs=row % 2 or None)
        sequences.append(Sequence(work, PagePool(0, 4).acquire(0)))
    logits = torch.randn(100, VOCABULARY, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(dim=-1)
    found = [pair for part in score(logits, best, sequences) for pair in part.by_row()]
    assert [sequence for sequence, _ in found] == sequences[1::2]
    for token, (_, scored) in zip(best[1::2], found, strict=True):
        assert scored.token == token == scored.logprobs.top_token_ids[0]


@pytest.mark.parametrize("wanted", [None, 0, 20])
def test_the_wish_and_the_answer_travel(wanted: int | None) -> None:
    work = Work(AttemptKey("r", 1), [1], Sampling(), 9, frozenset(), logprobs=wanted)
    assert work_from(work_to(work)) == work
    told = Logprobs(-0.5, (3, 4), (-0.25, -0.5))
    assert logprobs_from(logprobs_to(told)) == told

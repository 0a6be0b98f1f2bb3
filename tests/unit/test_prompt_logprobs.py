"""How likely a prompt's tokens were: the engine against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_loop import load
from tiny_models import TINY_MODELS, save

from baton.core.types import AttemptKey, Logprobs, Sampling, Work
from baton.core.wire import work_from, work_to
from baton.engine.engine import Engine
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence

LONG = [5, 3, 8, 120, 44, 7, 90, 91, 3, 8, 120, 1, 2, 60, 61, 62, 63, 14, 15]
SHORT = [9, 8, 7]


def begin(pool: PagePool, prompt: list[int], wanted: int | None) -> Sequence:
    work = Work(
        AttemptKey(str(len(prompt)), 1), prompt, Sampling(), 3, frozenset(), prompt_logprobs=wanted
    )
    pages = pool.pages_for(len(prompt) + 3)
    lease = pool.acquire(pages)
    lease.cover(pages)
    return Sequence(work, lease)


def read(engine: Engine, sequences: list[Sequence], chunk: int) -> None:
    """Until each has its first token."""
    while any(each.generated == 0 for each in sequences):
        reading = [each for each in sequences if each.generated == 0]
        plan = {each: min(chunk, each.uncomputed) for each in reading}
        for sequence, token in zip(plan, engine.step(plan), strict=True):
            if isinstance(token, int):
                sequence.append(token)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_prompts_probabilities_are_transformers_in_chunks_of_any_size(
    tmp_path: Path, name: str, chunk: int
) -> None:
    oracle = save(TINY_MODELS[name], tmp_path)
    engine = load(tmp_path, page_size=4)
    asking, silent = begin(engine.pool, LONG, 3), begin(engine.pool, SHORT, None)
    alone = begin(engine.pool, LONG[:1], 0)
    read(engine, [silent, asking, alone], chunk)
    assert silent.prompt_scores == alone.prompt_scores == []
    with torch.no_grad():
        expected = oracle(torch.tensor([LONG])).logits[0, :-1].double().log_softmax(dim=-1)
    chosen = expected.gather(1, torch.tensor(LONG[1:])[:, None])[:, 0]
    told = asking.prompt_scores
    assert [each.logprob for each in told] == pytest.approx(chosen.tolist(), abs=1e-4)
    best = expected.topk(3)
    assert [list(each.top_token_ids) for each in told] == best.indices.tolist()


def test_what_is_computed_again_is_told_once(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = load(tmp_path, page_size=4)
    sequence = begin(engine.pool, LONG, 0)
    engine.step({sequence: 8})
    first = list(sequence.prompt_scores)
    sequence.computed = 4  # preempted, and found again in part
    read(engine, [sequence], 6)
    assert len(sequence.prompt_scores) == len(LONG) - 1
    assert sequence.prompt_scores[:8] == first


def test_a_prompt_that_is_scored_shares_no_pages() -> None:
    works = [
        Work(AttemptKey("r", epoch), [1], Sampling(), 1, frozenset(), 0, "salt", None, "", wanted)
        for epoch, wanted in ((1, None), (1, 0), (2, 0))
    ]
    assert works[0].cache_name == "salt"
    assert len({work.cache_name for work in works}) == 3


@pytest.mark.parametrize("wanted", [None, 0, 20])
def test_the_wish_travels(wanted: int | None) -> None:
    work = Work(AttemptKey("r", 1), [1], Sampling(), 9, frozenset(), prompt_logprobs=wanted)
    assert work_from(work_to(work)) == work


def test_scores_come_in_order() -> None:
    sequence = begin(PagePool(8, 4), SHORT, 0)
    for position in (0, 0, 1):
        sequence.add_prompt_score(position, Logprobs(-float(position)))
    assert [each.logprob for each in sequence.prompt_scores] == [0.0, -1.0]

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_models import TINY_MODELS, VOCABULARY, save

from core.types import AttemptKey, Sampling, Work
from engine import kept_pages
from engine.engine import Engine
from engine.kept_pages import SPARE_PAGES, KeptPages
from engine.page_pool import PagePool
from engine.sequence import Piece, Sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save(TINY_MODELS["llama"], made)
    return made


def restless_life(engine: Engine, seed: int) -> list[list[int]]:
    """Sequences that join, leave, pause and lose their pages, one token a step."""
    draw = random.Random(seed)
    pool, answers = engine.pool, []
    live: list[Sequence] = []
    for step in range(120):
        if step % 7 == 0 and len(live) < 5:
            prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30))]
            work = Work(AttemptKey("r", step), prompt, Sampling(), 200, frozenset())
            live.append(Sequence(work, pool.acquire(pool.pages_for(200))))
        if live and draw.random() < 0.05:
            live[0].computed = 0
        if live and draw.random() < 0.05:
            gone = live.pop(draw.randrange(len(live)))
            answers.append(gone.tokens)
            gone.lease.release()
        plan = [Piece(each, each.uncomputed) for each in live if draw.random() < 0.9]
        if plan:
            for piece, token in zip(plan, engine.step(plan), strict=True):
                assert token is not None
                piece.sequence.append(token)
    for each in live:
        answers.append(each.tokens)
        each.lease.release()
    return answers


@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_what_is_kept(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(folder, kv_memory=8 << 20, page_size=4)
    kept = restless_life(engine, seed)
    monkeypatch.setattr(kept_pages, "BUDGET", 0)
    assert restless_life(engine, seed) == kept


def sequences(count: int, computed: int) -> list[Sequence]:
    pool = PagePool(100, page_size=4)
    work = Work(AttemptKey("r", 1), range(computed + 1), Sampling(), 8, frozenset())
    return [Sequence(work, pool.acquire(5), computed=computed) for _ in range(count)]


def started(batch: list[Sequence]) -> KeptPages:
    kept = KeptPages(token_bytes=8, page_size=4)
    assert not kept.follows(batch)
    assert kept.start(longest=2, layers=1)
    return kept


def advance(batch: list[Sequence]) -> None:
    for sequence in batch:
        sequence.computed += 1


def test_the_next_token_of_the_same_sequences_follows() -> None:
    batch = sequences(3, computed=5)
    kept = started(batch)
    advance(batch)
    assert kept.follows(list(batch))


def test_a_step_that_is_run_again_does_not_follow() -> None:
    batch = sequences(3, computed=5)
    assert not started(batch).follows(batch)


def test_other_sequences_do_not_follow() -> None:
    batch = sequences(3, computed=5)
    kept = started(batch)
    advance(batch)
    assert not kept.follows(batch[:2])
    advance(batch)
    assert not kept.follows([*batch[:1], *sequences(1, computed=7)])


def test_a_sequence_that_outgrows_the_spare_pages_does_not_follow() -> None:
    batch = sequences(1, computed=5)
    kept = started(batch)
    for _ in range((2 + SPARE_PAGES) * 4 - 6):
        advance(batch)
        assert kept.follows(batch)
    advance(batch)
    assert not kept.follows(batch)

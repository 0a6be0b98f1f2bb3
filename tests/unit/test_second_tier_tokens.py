"""The same tokens whatever is cached where, compared with those of transformers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_loop import answer
from tiny_models import TINY_MODELS, VOCABULARY, generate_with_transformers, save

from baton.core.config import CacheConfig, Size
from baton.core.types import AttemptKey, Sampling, Work
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.model_choice import KvDtype
from baton.engine.second_tier import SecondTier, second_tier_of
from baton.engine.sequence import Sequence
from baton.engine.tier_copies import Tier
from baton.worker.backend import open_second_tier

PAGE = 4
ANSWER = 8
LARGE = 1200
SMALL = {"llama": 24, "mistral-window": 12, "qwen2-layer-types": 40}
"""Pages of pools: for everything; and by model, for the two longest requests."""
PAGES: list[tuple[str, KvDtype]] = [
    *((name, "auto") for name in SMALL),
    ("llama", "int8"),
    ("llama", "int4"),
]
WAKE_SECONDS = 10.0


def prompts() -> list[list[int]]:
    """Some begin alike."""
    draw = random.Random(5)
    start = [draw.randrange(VOCABULARY) for _ in range(21)]
    own = [[draw.randrange(VOCABULARY) for _ in range(9 + 2 * i)] for i in range(6)]
    return [start + own[0], own[1], start[:13] + own[2], own[3] + start, start + own[4], own[5]]


@dataclass
class Oracle:
    folder: Path
    kv_dtype: KvDtype
    answers: list[list[int]]
    page_bytes: int
    small: int  # pages

    def cache(self, rows: int, files: Path | None = None) -> CacheConfig:
        """With so many pages in host memory."""
        return CacheConfig(Size(rows * self.page_bytes), str(files or ""))


@pytest.fixture(scope="module", params=PAGES, ids="-".join)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("tiny")
    name, kv_dtype = request.param
    whole_codes = {"head_dim": 16} if kv_dtype == "int4" else {}
    model = save(TINY_MODELS[name].changed(**whole_codes), folder)
    engine = Engine.load(folder, page_size=PAGE, kv_memory=1 << 20, kv_dtype=kv_dtype)
    if kv_dtype == "auto":
        answers = [generate_with_transformers(model, each, ANSWER) for each in prompts()]
    else:
        answers = [answer(engine, each, ANSWER) for each in prompts()]
    return Oracle(folder, kv_dtype, answers, engine.kv[0].nbytes, SMALL[name])


class Server:
    """An engine that reads prompts and writes answers, as a decode worker does."""

    def __init__(self, oracle: Oracle, pages: int, cache: CacheConfig | None) -> None:
        kv_memory = pages * oracle.page_bytes
        self.engine = Engine.load(
            oracle.folder, page_size=PAGE, kv_memory=kv_memory, kv_dtype=oracle.kv_dtype
        )
        assert self.engine.pool.total == pages
        self.pool = self.engine.pool
        self._woken = threading.Event()
        if cache is not None:
            self.pool.root = b"of these weights"
            open_second_tier(self.engine, cache, "decode-0", self._woken.set)
        self._scheduler = DecodeScheduler(self.pool, max_batch=4, chunk_tokens=16)

    @property
    def tier(self) -> SecondTier:
        tier = second_tier_of(self.pool)
        assert tier is not None
        return tier

    def ask(self, together: int = 1) -> list[list[int]]:
        """The answers to all prompts, so many at a time."""
        asked, answers = prompts(), []
        for start in range(0, len(asked), together):
            some = [self._compute(prompt) for prompt in asked[start : start + together]]
            while any(each.generated < ANSWER for each in some):
                self._step()
            answers += [each.tokens[each.prompt_length :] for each in some]
        return answers

    def rest(self) -> None:
        """Lets copies end, as in an idle worker."""
        while self.pool.returning or (self.tier.files is not None and self.tier.files.pending):
            assert self._woken.wait(WAKE_SECONDS)
            self._woken.clear()
            self.pool.second_tier.advance()

    def _compute(self, prompt: list[int]) -> Sequence:
        work = Work(AttemptKey(str(prompt), 1), prompt, Sampling(), ANSWER, frozenset())
        sequence = Sequence.queued(work, self.pool)
        self._scheduler.compute(sequence)
        return sequence

    def _step(self) -> None:
        self._woken.clear()
        self.pool.second_tier.advance()
        plan = self._scheduler.next()
        if not plan:
            assert self._woken.wait(WAKE_SECONDS), "nothing is copied, and nothing can run"
            return
        for sequence, token in zip(plan, self.engine.step(plan), strict=True):
            sequence.settle(sequence.computed)
            if token is not None and sequence.append(token):
                self._scheduler.remove(sequence)


@pytest.mark.parametrize("together", [1, 6])
@pytest.mark.parametrize(
    ("small", "rows"),
    [(False, None), (False, 0), (True, 0), (True, 600)],
    ids=["off", "warm", "half evicted", "second tier"],
)
def test_tokens_do_not_depend_on_what_is_cached(
    oracle: Oracle, small: bool, rows: int | None, together: int
) -> None:
    cache = None if rows is None else oracle.cache(rows)
    server = Server(oracle, oracle.small if small else LARGE, cache)
    for _ in range(3):
        assert server.ask(together) == oracle.answers
    if second_tier_of(server.pool) is not None:
        server.rest()
        assert server.tier.counts[Tier.HOST].restored
    assert server.pool.check_integrity(held=0) == ""


def damage_some(folder: Path) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[::3]:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("rows", [0, 8])
@pytest.mark.parametrize("meanwhile", [None, damage_some], ids=["sound", "damaged"])
def test_tokens_are_the_same_across_restarts(
    oracle: Oracle, rows: int, meanwhile: Callable[[Path], None] | None, tmp_path: Path
) -> None:
    cache = oracle.cache(rows, tmp_path)
    for _ in range(3):
        server = Server(oracle, oracle.small, cache)
        server.rest()
        assert server.ask(together=2) == oracle.answers
        server.rest()
        assert server.pool.check_integrity(held=0) == ""
        last = server.tier.counts[Tier.FILES]
        server.tier.close(seconds=10.0)
        if meanwhile is not None:
            meanwhile(tmp_path)
    assert last.restored
    assert bool(last.damaged) == (meanwhile is not None)

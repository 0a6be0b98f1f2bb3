"""The same tokens whatever is cached, and nothing computed or moved that is there already."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import ProcessCluster, scrape
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save
from transformers import PreTrainedModel

from baton import Answer
from baton.core import metrics

PAGE = 5
ANSWER = 12


def tree(kv_memory: int = 2 << 20, **settings: object) -> dict[str, object]:
    return {
        "page_size": PAGE,
        "page_digests": "on",
        "prefill": {"kv_memory": kv_memory, "chunk_tokens": 32, "threads": 1},
        "decode": {"kv_memory": kv_memory, "threads": 1},
        "router": {"local_prefill": "never", "fetch_pages": "always"},
        **settings,
    }


@dataclass
class Bench:
    cluster: ProcessCluster
    oracle: PreTrainedModel
    last: Answer = field(init=False)

    def ask(self, prompt: list[int], salt: str = "", ttl: int = 0) -> list[int]:
        """The answer, which is what transformers say."""
        with self.cluster.client() as client:
            answer = client.generate(
                prompt, max_tokens=ANSWER, cache_salt=salt, cache_ttl=ttl, timeout=60
            )
        self.last = answer
        tokens = list(answer.token_ids)
        assert len(tokens) == ANSWER
        assert [tokens] == choices_of_transformers(self.oracle, [prompt], [tokens])
        return tokens

    def measured(self, worker: str, name: str) -> float:
        self.cluster.wait_idle()
        return scrape(self.cluster.workers[worker].wait_for(r"metrics on (\S+)"))[name]

    def hits(self) -> tuple[float, float]:
        """Tokens found so far by prefill and by decode."""
        name = metrics.CACHE_HIT_TOKENS
        return self.measured("prefill-0", name), self.measured("decode-0", name)

    def fetched(self) -> float:
        return self.measured("prefill-0", metrics.FETCHED_PAGES)

    def pushed(self) -> float:
        return self.measured("prefill-0", metrics.TRANSFER_BYTES)

    def found_by(self, prompt: list[int], salt: str = "") -> tuple[float, float]:
        before = self.hits()
        self.ask(prompt, salt)
        after = self.hits()
        return after[0] - before[0], after[1] - before[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save(TINY_MODELS["llama"], folder)


@pytest.fixture(scope="module")
def bench(
    model: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with ProcessCluster(model[0], tmp_path_factory.mktemp("cache"), tree=tree()) as cluster:
        yield Bench(cluster, model[1])
        cluster.wait_idle()


def prompt(seed: int, length: int = 63) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def test_a_second_time_only_the_last_page_is_computed_and_moved(bench: Bench) -> None:
    asked = prompt(1)
    before = bench.pushed()
    assert bench.found_by(asked) == (0, 0)
    cold = bench.pushed() - before
    assert bench.found_by(asked) == (60, 60)
    warm = bench.pushed() - before - cold
    assert (cold, warm) == (13 * warm, warm)


def test_a_prompt_of_full_pages_still_computes_its_last_token(bench: Bench) -> None:
    asked = prompt(2, length=4 * PAGE)
    bench.ask(asked)
    assert bench.found_by(asked) == (15, 15)


def test_the_next_turn_finds_its_whole_history_where_it_was_written(bench: Bench) -> None:
    asked = prompt(3)
    history = asked + bench.ask(asked)
    # Of 75 tokens the last one was never computed. Prefill has only seen the prompt, and
    # fetches what decode has written.
    before = bench.fetched()
    assert bench.found_by(history + prompt(4, length=9)) == (70, 70)
    assert bench.fetched() - before == 2
    assert bench.found_by(history + prompt(5, length=9)) == (75, 75)
    assert bench.fetched() - before == 2


def test_a_chat_is_never_read_twice(bench: Bench) -> None:
    """Turn by turn, prefill computes what is new and fetches what decode has written."""
    history: list[int] = []
    for turn in range(4):
        history += prompt(20 + turn, length=9)
        known = max(len(history) - 10, 0) // PAGE * PAGE
        found = bench.found_by(history)
        assert found == (known, known)
        history += bench.last.token_ids
        usage = bench.last.usage
        assert (usage.cached_tokens, usage.fetched_tokens > 0) == (known, turn > 0)
        code = bench.last.placements[0].reason_code
        assert code == ("fetched" if turn else "least_time")


def test_a_rewritten_history_is_shared_up_to_where_it_differs(bench: Bench) -> None:
    asked = prompt(6)
    bench.ask(asked)
    rewritten = [*asked[:32], (asked[32] + 1) % VOCABULARY, *asked[33:]]
    assert bench.found_by(rewritten) == (30, 30)
    assert bench.found_by([*asked[:32], *asked[40:]]) == (30, 30)


def test_salts_share_nothing(bench: Bench) -> None:
    asked = prompt(7)
    bench.ask(asked, "one")
    assert bench.found_by(asked, "two") == (0, 0)
    assert bench.found_by(asked) == (0, 0)
    assert bench.found_by(asked, "one") == (60, 60)


@pytest.mark.parametrize(("worker", "found"), [("prefill-0", (60, 60)), ("decode-0", (60, 0))])
def test_a_worker_that_restarts_has_forgotten_and_the_other_has_not(
    bench: Bench, worker: str, found: tuple[int, int]
) -> None:
    asked = prompt(8)
    bench.ask(asked)
    bench.cluster.workers[worker].kill()
    bench.cluster.restart(worker)
    before = bench.hits()
    bench.ask(asked)
    after = bench.hits()
    assert (after[0] - before[0], after[1] - before[1]) == found


def test_what_is_half_evicted_is_half_found(
    model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """Pools of 40 pages, and prompts and answers that take more than four times as many."""
    with ProcessCluster(model[0], tmp_path, tree=tree(40 * page_bytes(model[1]))) as cluster:
        made = Bench(cluster, model[1])
        asked = [prompt(seed, length=40 + 5 * seed) for seed in range(12)]
        for each in asked + asked[::-1]:
            made.ask(each)
        assert all(made.measured(worker, metrics.CACHE_EVICTED_PAGES) for worker in cluster.workers)
        assert all(made.hits())
        # A hint keeps a prompt, which the others would have had evicted, on both workers.
        hinted, plain = prompt(20), prompt(21)
        made.ask(hinted, ttl=3600)
        made.ask(plain)
        for each in asked:
            made.ask(each)
        assert made.found_by(plain) == (0, 0)
        assert made.found_by(hinted) == (60, 60)


def page_bytes(model: PreTrainedModel) -> int:
    shape = model.config
    heads, head_dim = shape.num_key_value_heads, shape.hidden_size // shape.num_attention_heads
    size: int = shape.num_hidden_layers * 2 * PAGE * heads * head_dim * 4
    return size


def test_without_a_cache_nothing_is_found_and_the_answers_are_the_same(
    model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    with ProcessCluster(model[0], tmp_path, tree=tree(prefix_cache=False)) as cluster:
        made = Bench(cluster, model[1])
        for _ in range(2):
            assert made.found_by(prompt(1)) == (0, 0)
        assert made.measured("decode-0", metrics.CACHE_QUERIED_TOKENS) == 0

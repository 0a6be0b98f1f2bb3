"""Sessions find their caches: two prefill and two decode workers, and prompts that take long enough
that a cache outweighs what else goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ProcessCluster, scrape

from baton import Answer
from baton.core import metrics

SESSIONS = 4
PROMPT = 480
OPTIONS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
TREE: dict[str, object] = {
    "prefill": {"kv_memory": "64MiB", "threads": 1},
    "decode": {"kv_memory": "64MiB", "threads": 1},
}


@pytest.fixture(scope="module")
def cluster(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("sessions")
    with ProcessCluster(shallow, folder, prefill=2, decode=2, tree=TREE) as running:
        yield running


def tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(count)]


def ask(cluster: ProcessCluster, prompt: list[int], salt: str = "") -> Answer:
    """Of idle workers: what they report of a request before could else outweigh a cache."""
    cluster.wait_idle()
    with cluster.client() as client:
        return client.generate(prompt, **OPTIONS, cache_salt=salt)


def next_turn(prompt: list[int], answer: Answer, seed: int) -> list[int]:
    return [*prompt, *answer.token_ids, *tokens(seed, 7)]


def test_a_sessions_next_turn_lands_where_its_cache_is(cluster: ProcessCluster) -> None:
    """All users ask at once, so that their sessions begin on both prefill workers."""
    prompts = [tokens(seed, PROMPT) for seed in range(SESSIONS)]
    with cluster.client() as client, ThreadPoolExecutor(SESSIONS) as threads:
        first = list(threads.map(lambda prompt: client.generate(prompt, **OPTIONS), prompts))
    assert {answer.usage.cached_tokens for answer in first} == {0}
    assert len({answer.prefill_worker for answer in first}) == 2
    turns = [next_turn(*pair, seed=9) for pair in zip(prompts, first, strict=True)]
    for turn, before in zip(turns, first, strict=True):
        answer = ask(cluster, turn)
        assert answer.prefill_worker == before.prefill_worker
        assert answer.usage.cached_tokens >= PROMPT
        assert answer.placements[0].reason_code == "cached"
    assert answer.token_ids == ask(cluster, turn, salt="x").token_ids


def test_salts_keep_caches_apart(cluster: ProcessCluster) -> None:
    prompt = tokens(77, PROMPT)
    answers = [ask(cluster, prompt, salt) for salt in ("mine", "yours", "mine")]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 0, PROMPT - 16]


def test_metrics_tell_hits_decisions_and_forecasts(cluster: ProcessCluster) -> None:
    prompt = tokens(78, PROMPT)
    before = scrape(cluster.metrics, "reason")
    answers = [ask(cluster, prompt) for _ in range(2)]
    after = scrape(cluster.metrics, "reason")
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    assert answers[1].placements[0].predicted_seconds > 0
    assert change[f"{metrics.PLACEMENTS} cached"] == 1
    assert change[f"{metrics.TTFT_FORECAST_RATIO}_count"] == 2
    assert change[metrics.CACHED_TOKENS] >= 2 * (PROMPT - 16)


def test_status_tells_what_each_worker_holds_and_finds(cluster: ProcessCluster) -> None:
    with cluster.client() as client:
        workers = list(client.status().workers)
    assert all(0 < worker.cached_tokens < worker.prompt_tokens for worker in workers)
    assert all(worker.known_pages > 0 for worker in workers)

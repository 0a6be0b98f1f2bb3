"""Workers whose model several processes share, with prefill and decode of the same and of other
sizes: tokens equal transformers', and no process outlives its worker."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import ProcessCluster
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save
from transformers import PreTrainedModel

from baton.core.metrics import CACHE_HIT_TOKENS

ANSWER = 16
# Pairs in turn: prefill-0 and decode-0, prefill-1 and decode-1.
SIZES = {"prefill-0": 1, "decode-0": 2, "prefill-1": 2, "decode-1": 1}


@dataclass(frozen=True)
class Split:
    cluster: ProcessCluster
    oracle: PreTrainedModel

    def ask(self, prompts: list[list[int]]) -> set[tuple[int, int]]:
        """Answers like transformers'; the sizes of the pairs that gave them."""
        with self.cluster.client() as client, ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(
                threads.map(
                    lambda prompt: client.generate(prompt, max_tokens=ANSWER, timeout=60), prompts
                )
            )
        found = [list(answer.token_ids) for answer in answers]
        assert {len(tokens) for tokens in found} == {ANSWER}
        assert found == choices_of_transformers(self.oracle, prompts, found)
        return {(SIZES[each.prefill_worker], SIZES[each.decode_worker]) for each in answers}


@pytest.fixture(scope="module", params=["qwen3-windows", "deepseek-v3"])
def split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Split]:
    """Pages by heads, and latents, of which every process has all."""
    workspace = tmp_path_factory.mktemp("split")
    oracle = save(TINY_MODELS[request.param], workspace / "model")
    tree: dict[str, object] = {
        "page_size": 4,
        "router": {"policy": "round_robin"},
        "prefill": {"kv_memory": "4MiB", "threads": 1, "chunk_tokens": 24},
        "decode": {"kv_memory": "4MiB", "threads": 1, "nice": 0},
    }
    cluster = ProcessCluster(
        workspace / "model",
        workspace,
        prefill=2,
        decode=2,
        tree=tree,
        per_worker={name: _sized(tree, name, size) for name, size in SIZES.items()},
    )
    with cluster:
        yield Split(cluster, oracle)


def _sized(tree: dict[str, object], name: str, size: int) -> dict[str, object]:
    role, _, _ = name.partition("-")
    section = tree[role]
    assert isinstance(section, dict)
    return {role: {**section, "tensor_parallel": size}}


def prompts(seed: int) -> list[list[int]]:
    """Half of them begin alike."""
    draw = random.Random(seed)
    shared = [draw.randrange(VOCABULARY) for _ in range(30)]
    drawn = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (1, 9, 40, 70)]
    return [*drawn, *(shared + prompt[:7] for prompt in drawn)]


def children(pid: int) -> list[int]:
    """The processes that any of its threads has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# In the order of a life: each test leaves fewer workers to the next.


def test_pairs_of_other_sizes_answer_as_transformers_does(split: Split) -> None:
    pairs = split.ask(prompts(0)) | split.ask(prompts(0))
    assert pairs == {(1, 2), (2, 1)}
    assert split.cluster.metric("decode-0", CACHE_HIT_TOKENS) > 0
    split.cluster.wait_idle()


def test_pairs_of_the_same_size_answer_as_transformers_does(split: Split) -> None:
    leaving = split.cluster.workers["decode-1"]
    leaving.send(signal.SIGTERM)
    assert leaving.wait() == 0
    assert split.ask(prompts(1)) == {(1, 2), (2, 2)}


def test_a_worker_ends_with_any_of_its_processes_and_requests_go_on(split: Split) -> None:
    worker = split.cluster.workers.pop("prefill-1")
    (other,) = children(worker.pid)
    os.kill(other, signal.SIGKILL)
    assert worker.wait() != 0
    assert "rank-1 of this worker has ended" in worker.log
    assert split.ask(prompts(2)) == {(1, 2)}


def test_the_processes_of_a_killed_worker_end(split: Split) -> None:
    worker = split.cluster.workers.pop("decode-0")
    (other,) = children(worker.pid)
    worker.kill()
    deadline = time.monotonic() + 10
    while is_running(other):
        assert time.monotonic() < deadline
        time.sleep(0.02)

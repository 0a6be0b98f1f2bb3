"""A cluster whose pools are far too small for what it is asked, and which is restarted."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from processes import ProcessCluster, scrape
from tiny_models import TINY_MODELS, VOCABULARY, generate_with_transformers, save

from baton.core import metrics

PAGE = 5
ANSWER = 8
PAGES = 40
WORKERS = ("prefill-0", "decode-0")


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(40 + 5 * seed)]


def restored(cluster: ProcessCluster, worker: str) -> float:
    """Pages that came back from host memory or files."""
    cluster.wait_idle()
    found = scrape(cluster.workers[worker].wait_for(r"metrics on (\S+)"), label="event")
    return found.get(f"{metrics.TIER_EVENTS} restored", 0.0)


def test_answers_are_the_same_from_host_memory_and_from_files_after_a_restart(
    tmp_path: Path,
) -> None:
    oracle = save(TINY_MODELS["llama"], tmp_path / "model")
    shape = oracle.config
    page_bytes = shape.num_hidden_layers * 2 * PAGE * shape.hidden_size * 4
    tree = {
        "page_size": PAGE,
        "page_digests": "on",
        "prefill": {"kv_memory": PAGES * page_bytes, "threads": 1},
        # Two processes have a part each of what one row, and one file, hold.
        "decode": {"kv_memory": PAGES * page_bytes, "threads": 1, "tensor_parallel": 2},
        "router": {"local_prefill": "never"},
        "cache": {"host_memory": 2 * PAGES * page_bytes, "files": str(tmp_path / "files")},
    }
    asked = [prompt(seed) for seed in range(6)]
    wanted = [generate_with_transformers(oracle, each, ANSWER) for each in asked]

    reasons = set()

    def answers() -> list[list[int]]:
        with cluster.client() as client:
            found = [client.generate(each, max_tokens=ANSWER, timeout=60) for each in asked]
        reasons.clear()
        reasons.update(answer.placements[0].reason_code for answer in found)
        return [list(answer.token_ids) for answer in found]

    with ProcessCluster(tmp_path / "model", tmp_path / "cluster", tree=tree) as cluster:
        assert answers() == answers() == wanted
        assert all(restored(cluster, worker) for worker in WORKERS)
        for worker, number in zip(WORKERS, (signal.SIGTERM, signal.SIGKILL), strict=True):
            cluster.workers[worker].send(number)
        for worker in WORKERS:
            cluster.restart(worker)
        assert all(status.load.kept_pages for status in cluster.wait_idle())
        assert answers() == wanted
        assert all(restored(cluster, worker) for worker in WORKERS)
        assert "cached" in reasons, "the router was told what the files hold"
        assert holders(tmp_path / "files") == set(WORKERS)
        with cluster.client() as client:
            client.drain("decode-0")
        assert cluster.workers["decode-0"].wait() == 0
        assert holders(tmp_path / "files") == {"prefill-0"}, "one that is drained for good has none"


def holders(files: Path) -> set[str]:
    """The workers that have pages in files."""
    return {path.relative_to(files).parts[1] for path in files.rglob("*") if path.is_file()}

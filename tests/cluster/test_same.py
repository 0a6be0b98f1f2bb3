"""An answer depends on its request alone: bench.same in a small form, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

from processes import ProcessCluster
from text_model import save_text_model

from bench.same import Asker, Settings, prompts, ways

POOL = {"kv_memory": "64MiB", "threads": 1}
TREE: dict[str, object] = {
    "dtype": "bfloat16",
    "prefill": POOL,
    "decode": POOL,
    "router": {"local_prefill": "auto"},
}


def test_answers_are_the_same_in_any_company(tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    asker = Asker(prompts(4), Settings(tokens=60, temperature=0.9, n=2, presence_penalty=0.3))
    with (
        ProcessCluster(tmp_path / "model", tmp_path, prefill=2, decode=2, tree=TREE) as cluster,
        cluster.client() as client,
    ):

        def kill() -> None:
            time.sleep(0.3)
            cluster.workers.pop("decode-1").kill()

        (_, wanted), *rest = ways(client, asker, kill)
    assert len({answer.token_ids for answer in wanted}) == 8
    assert len(rest) == 5
    for way, found in rest:
        assert found == wanted, way

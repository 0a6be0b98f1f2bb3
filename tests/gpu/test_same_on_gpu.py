"""On a GPU an answer depends on its request alone: bench.same in a small form, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pools import CUDA
from processes import ProcessCluster
from text_model import save_text_model

from bench.same import Asker, Settings, prompts, ways

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

POOL = {"kv_memory": "256MiB"}
TREE: dict[str, object] = {
    "dtype": "bfloat16",
    "prefill": POOL,
    "decode": POOL,
    "router": {"local_prefill": "auto"},
}


@pytest.mark.parametrize(
    ("temperature", "options"),
    [(0.0, {}), (1.2, {}), (0.0, {"kv_dtype": "int8", "speculation": "ngram"})],
)
def test_answers_are_the_same_in_any_company(
    temperature: float, options: dict[str, object], tmp_path: Path
) -> None:
    save_text_model(tmp_path / "model")
    asker = Asker(prompts(40), Settings(60, temperature, n=2, presence_penalty=0.3))
    with (
        ProcessCluster(
            tmp_path / "model", tmp_path, prefill=2, decode=2, tree=TREE | options
        ) as cluster,
        cluster.client() as client,
    ):

        def kill() -> None:
            time.sleep(0.1)
            cluster.workers.pop("decode-1").kill()

        (_, wanted), *rest = ways(client, asker, kill)
    assert len(rest) == 5
    for way, found in rest:
        assert found == wanted, way

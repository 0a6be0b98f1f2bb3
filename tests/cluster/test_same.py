"""An answer depends on its request alone: bench.same in a small form, bit for bit."""

from __future__ import annotations

from pathlib import Path

from text_model import save_text_model

from bench.processes import FREE_ROUTER
from bench.same import Asker, Settings, prompts, ways


def test_answers_are_the_same_in_any_company(tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    pool = {"kv_memory": "64MiB", "threads": 1}
    tree: dict[str, object] = {
        "model": str(tmp_path / "model"),
        "dtype": "bfloat16",
        "prefill": pool,
        "decode": pool,
        "router": {**FREE_ROUTER},
        "log_level": "warning",
    }
    asker = Asker(prompts(6), Settings(tokens=60, temperature=0.9, n=2, presence_penalty=0.3))
    (_, wanted), *rest = ways(tree, asker, tmp_path, kill_after=0.3, layouts=())
    assert len({answer.token_ids for answer in wanted}) == 12
    assert len(rest) == 5
    for way, found in rest:
        assert found == wanted, way

"""Workers whose model several processes share, on a Ray whose nodes have two GPUs each.

The GPUs are Ray's alone: the workers compute on CPUs. `make test-fleet` runs this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ray_nodes import TOKEN, Node, RayNodes
from serving import Serve
from tiny_models import TINY_MODELS, generate_with_transformers, save

pytestmark = pytest.mark.fleet

GPUS = "CUDA_VISIBLE_DEVICES"
PROMPT = list(range(1, 40))
POOL = {"tensor_parallel": 2, "kv_memory": "4MiB", "threads": 2}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as ray:
        for name in ("one", "two"):
            ray.add(name, slots=2)
        yield ray


def test_each_node_gets_a_worker_that_takes_all_its_gpus(nodes: RayNodes, tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama"], tmp_path / "model")
    config = tmp_path / "baton.yaml"
    config.write_text(yaml.safe_dump({"insecure": True, "prefill": POOL, "decode": POOL}))
    flags = ["--config", str(config), "--model", str(tmp_path / "model")]
    flags += ["--ray-address", nodes.address]
    with (
        Serve(tmp_path / "serve", *flags, environment=TOKEN) as serve,
        serve.ready().client() as client,
    ):
        answer = client.generate(PROMPT, max_tokens=12, timeout=60)
        expected = generate_with_transformers(oracle, PROMPT, 12)
        assert list(answer.token_ids) == expected
        status = client.status()
        placed = [nodes.nodes[name].workers(status) for name in ("one", "two")]
        assert sorted(map(sorted, placed)) == [["decode-0"], ["prefill-0"]]
        for name in ("one", "two"):
            assert visible_gpus(nodes.nodes[name]) == {"0,1"}


def visible_gpus(node: Node) -> set[str]:
    """What the ranks of the node's workers see."""
    ranks = [pid for pid, line in node.processes().items() if "worker.rank" in line]
    assert len(ranks) == 1
    pairs = Path(f"/proc/{ranks[0]}/environ").read_text().split("\0")
    return {value for name, _, value in (pair.partition("=") for pair in pairs) if name == GPUS}

"""A worker whose node lacks an adapter's files gets them from a worker that has them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from adapters import save_adapter
from processes import START_SECONDS, ProcessCluster
from tiny_models import TINY_MODELS, choices_of_transformers, save
from transformers import PreTrainedModel

from baton import Client
from baton.core.adapter_store import copy_folder, find_adapter
from baton.core.errors import AdapterMissing

PROMPT = list(range(20, 50))
TREE: dict[str, object] = {
    "prefill": {"kv_memory": "4MiB", "threads": 1},
    "decode": {"kv_memory": "4MiB", "threads": 1},
}


def check(client: Client, model: str, oracle: PreTrainedModel) -> None:
    answer = client.generate(PROMPT, model=model, max_tokens=12, ignore_eos=True, timeout=120)
    tokens = list(answer.token_ids)
    assert [tokens] == choices_of_transformers(oracle, [PROMPT], [tokens])


def test_an_adapter_is_fetched_where_its_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save(TINY_MODELS["llama"], tmp_path / "model")
    folder = tmp_path / "lora"
    sql = save_adapter(base, folder)
    adapter = find_adapter(str(folder))

    def copy_on(node: str) -> Path:
        """Processes started from now on are on this node, as far as files of the user go."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / node))
        return copy_folder(adapter.digest)

    first = copy_on("first")
    tree = {**TREE, "adapter_folders": [str(folder)]}
    with (
        ProcessCluster(tmp_path / "model", tmp_path / "cluster", tree=tree) as cluster,
        cluster.client() as client,
    ):

        def move_decode(node: str) -> Path:
            """Starts the decode worker again on another node."""
            copied = copy_on(node)
            cluster.workers["decode-0"].send(signal.SIGKILL)
            cluster.restart("decode-0")
            client.wait_ready(timeout=START_SECONDS)
            return copied

        client.add_adapter("sql", str(folder))
        first.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(first)
        second = move_decode("second")
        check(client, "sql", sql)
        assert second.is_dir()
        shutil.rmtree(first)
        move_decode("third")
        with pytest.raises(AdapterMissing, match="no other worker has sent it"):
            client.generate(PROMPT, model="sql", max_tokens=2)
        check(client, "model", base)
        cluster.wait_idle()

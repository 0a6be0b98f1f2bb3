"""Names of adapters in a cluster of Ray: the controller tells every router."""

from __future__ import annotations

import re
import time
from pathlib import Path

import yaml
from adapters import save_adapter
from serving import MODEST, Serve
from tiny_models import TINY_MODELS, choices_of_transformers, save

from baton import Client

PROMPT = list(range(20, 50))
SECONDS = 20.0


def wait_for_names(client: Client, wanted: set[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while (names := {model.name for model in client.models()}) != wanted:
        assert time.monotonic() < deadline, names
        time.sleep(0.05)


def test_a_name_that_one_router_adds_is_known_to_the_other(tmp_path: Path) -> None:
    base = save(TINY_MODELS["llama"], tmp_path / "model")
    adapted = {name: save_adapter(base, tmp_path / "more" / name, seed=seed)
               for seed, name in enumerate(("one", "two"))}  # fmt: skip
    config = tmp_path / "baton.yaml"
    config.write_text(yaml.safe_dump({**MODEST, "adapter_folders": [str(tmp_path / "more")]}))
    flags = ["--config", str(config), "--model", str(tmp_path / "model"), "--dtype", "float32"]
    flags += ["--routers", "2", "--adapter", f"one={tmp_path / 'more' / 'one'}"]
    with Serve(tmp_path / "serve", *flags) as serve:
        other = re.search(r"router-1 is at (\S+)", serve.ready().stdout)
        assert other
        with serve.client() as first, Client(other[1]) as second:
            first.add_adapter("two", str(tmp_path / "more" / "two"))
            wait_for_names(second, {"model", "one", "two"})
            for name, oracle in adapted.items():
                answer = list(second.generate(PROMPT, model=name, max_tokens=12).token_ids)
                assert [answer] == choices_of_transformers(oracle, [PROMPT], [answer])
            second.remove_adapter("one")
            wait_for_names(first, {"model", "two"})

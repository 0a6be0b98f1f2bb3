"""Names of adapters in a cluster of Ray: the controller tells every router."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from adapters import save_adapter
from serving import MODEST, Serve
from tiny_hub import TinyHub
from tiny_models import TINY_MODELS, choices_of_transformers, save
from typer.testing import CliRunner

from baton import Client
from baton.cli.app import app
from baton.core.errors import InvalidAdapter

PROMPT = list(range(20, 50))
SECONDS = 20.0


def wait_for_names(client: Client, wanted: set[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while (names := {model.name for model in client.models()}) != wanted:
        assert time.monotonic() < deadline, names
        time.sleep(0.05)


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    made = TinyHub()
    yield made
    made.close()


@pytest.mark.fleet
def test_a_name_that_one_router_adds_is_known_to_the_other(tmp_path: Path, hub: TinyHub) -> None:
    """Two of the adapters are a hub's: one from the start, one that is added."""
    base = save(TINY_MODELS["llama"], tmp_path / "model")
    adapted = {name: save_adapter(base, tmp_path / "more" / name, seed=seed)
               for seed, name in enumerate(("one", "two", "three", "four"))}  # fmt: skip
    for name in ("three", "four"):
        hub.push(f"org/{name}", tmp_path / "more" / name)
    config = tmp_path / "baton.yaml"
    config.write_text(
        yaml.safe_dump({**MODEST, "adapter_folders": [str(tmp_path / "more"), "hub:org/*"]})
    )
    flags = ["--config", str(config), "--model", str(tmp_path / "model"), "--dtype", "float32"]
    flags += ["--routers", "2", "--adapter", f"one={tmp_path / 'more' / 'one'}"]
    flags += ["--adapter", "three=org/three@main"]
    environment = hub.environment(tmp_path / "home")
    with Serve(tmp_path / "serve", *flags, environment=environment) as serve:
        other = re.search(r"router-1 is at (\S+)", serve.ready().stdout)
        assert other
        with serve.client() as first, Client(other[1]) as second:
            first.add_adapter("two", str(tmp_path / "more" / "two"))
            add_from_hub(serve.address, second)
            wait_for_names(second, {"model", "one", "two", "three", "four"})
            for name, oracle in adapted.items():
                answer = list(second.generate(PROMPT, model=name, max_tokens=12).token_ids)
                assert [answer] == choices_of_transformers(oracle, [PROMPT], [answer])
            second.remove_adapter("one")
            wait_for_names(first, {"model", "two", "three", "four"})
    assert set(hub.downloads().values()) == {1}, "all processes share a download"


def add_from_hub(address: str, client: Client) -> None:
    command = ["adapter", "add", "four", "org/four", "--address", address]
    assert CliRunner().invoke(app, command).exit_code == 0
    with pytest.raises(InvalidAdapter, match="no such model"):
        client.add_adapter("none", "org/none")
    with pytest.raises(InvalidAdapter, match="other/four is not a repository that the config"):
        client.add_adapter("none", "other/four")

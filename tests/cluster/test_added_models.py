"""Models of a cluster of Ray that come and go while the others serve: each test goes on where the
one before it has ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from serving import MODEST, START_SECONDS, Serve
from tiny_models import TINY_MODELS, choices_of_transformers, save
from transformers import PreTrainedModel

from baton import Client, Unavailable
from baton.core.errors import InvalidRequest, UnknownModel

PROMPT = list(range(20, 50))
LONG = 400
SHORT = 24
SHAPES = {"one": "llama", "two": "qwen2", "three": "qwen3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def oracles(folder: Path) -> dict[str, PreTrainedModel]:
    return {
        name: save(TINY_MODELS[shape].changed(max_position_embeddings=2048), folder / name, seed)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.fixture(scope="module")
def serve(
    folder: Path, oracles: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    config = folder / "baton.yaml"
    config.write_text(yaml.safe_dump({**MODEST, "dtype": "float32"}))
    models = ["--model", str(folder / "one"), "--model", str(folder / "two")]
    flags = ["--config", str(config), *models, "--kv-memory", "8MiB"]
    with Serve(tmp_path_factory.mktemp("serve"), *flags) as cluster:
        yield cluster.ready()


@pytest.fixture
def client(serve: Serve) -> Iterator[Client]:
    with serve.client() as made:
        yield made


def check(oracle: PreTrainedModel, answer: list[int], tokens: int) -> None:
    assert len(answer) == tokens
    assert [answer] == choices_of_transformers(oracle, [PROMPT], [answer])


def check_answer(client: Client, name: str, oracle: PreTrainedModel) -> None:
    answer = client.generate(PROMPT, model=name, max_tokens=SHORT, ignore_eos=True)
    check(oracle, list(answer.token_ids), SHORT)


def begin(client: Client, name: str, threads: ThreadPoolExecutor) -> Future[list[int]]:
    """A long answer that has begun."""
    stream = client.stream(PROMPT, model=name, max_tokens=LONG, ignore_eos=True)
    next(stream)

    def read() -> list[int]:
        for _ in stream:
            pass
        return list(stream.answer.token_ids)

    return threads.submit(read)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if condition():
                return
        except Unavailable:
            pass  # a process that restarts
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.05)


def names(client: Client) -> list[str]:
    return [model.name for model in client.models()]


def test_two_models_of_one_command_answer(
    client: Client, serve: Serve, oracles: dict[str, PreTrainedModel]
) -> None:
    assert "Baton serves one, two." in serve.stdout
    assert names(client) == ["one", "two"]
    for name in ("one", "two"):
        check_answer(client, name, oracles[name])
    pools = client.pools()
    assert {each.worker_id: each.model for each in pools.workers} == {
        "prefill-0": "one",
        "decode-0": "one",
        "prefill-1": "two",
        "decode-1": "two",
    }
    with pytest.raises(InvalidRequest, match="several models are served; name one: 'one', 'two'"):
        client.scale(decode=2)


def test_streams_of_both_are_exact_while_one_is_removed(
    client: Client, oracles: dict[str, PreTrainedModel]
) -> None:
    with ThreadPoolExecutor() as threads:
        answers = {name: begin(client, name, threads) for name in ("one", "two")}
        client.remove_model("two")
        wait_until(lambda: names(client) == ["one"])
        with pytest.raises(UnknownModel, match="no model 'two' here; this cluster serves 'one'"):
            client.generate(PROMPT, model="two")
        for name, answer in answers.items():
            check(oracles[name], answer.result(), LONG)
    wait_until(lambda: [each.model for each in client.pools().workers] == ["one", "one"])
    wait_until(lambda: [each.model for each in client.pools().models] == ["one"])
    check_answer(client, "one", oracles["one"])


def test_a_model_is_added_and_scaled_while_the_other_serves(
    client: Client, serve: Serve, folder: Path, oracles: dict[str, PreTrainedModel]
) -> None:
    with ThreadPoolExecutor() as threads:
        answer = begin(client, "one", threads)
        assert "three is served" in serve.ask("model", "add", "three", str(folder / "three"))
        wait_until(lambda: names(client) == ["one", "three"])
        check_answer(client, "three", oracles["three"])
        scaled = serve.ask("scale", "--model", "three", "--decode", "2")
        assert "1 prefill and 2 decode workers serve" in scaled
        check(oracles["one"], answer.result(), LONG)
    pools = {each.model: (each.prefill, each.decode) for each in client.pools().models}
    assert pools == {"one": (1, 1), "three": (1, 2)}


def test_what_cannot_be_added_or_removed_is_refused(client: Client, folder: Path) -> None:
    keys = f'{{"model": "{folder / "three"}"}}'
    for name, given, reason in (
        ("one", keys, "is a model that is served"),
        ("more", "[]", "keys of a model are a JSON object"),
        ("more", '{"model": "/nowhere"}', "not a folder with a config.json"),
        ("more", '{"model": "/nowhere", "tls": {}}', "is not a key of one model"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            client.add_model(name, given)
    with pytest.raises(UnknownModel, match="serves 'one', 'three'"):
        client.remove_model("two")
    assert names(client) == ["one", "three"]


def test_a_restarted_controller_and_router_know_the_models(
    client: Client, serve: Serve, folder: Path, oracles: dict[str, PreTrainedModel]
) -> None:
    shutil.rmtree(folder / "two")  # of the command that started it, and removed since
    for title in ("Controller", "RouterActor"):
        os.kill(serve.actor(title), signal.SIGKILL)
    wait_until(lambda: names(client) == ["one", "three"])
    wait_until(lambda: all(model.ready for model in client.status().models))
    for name in ("one", "three"):
        check_answer(client, name, oracles[name])
    assert [each.model for each in client.pools().models] == ["one", "three"]


def test_models_are_added_and_removed_over_http(
    client: Client, serve: Serve, folder: Path, oracles: dict[str, PreTrainedModel]
) -> None:
    found = re.search(r"curl (http://\S+)/v1/", serve.stdout)
    assert found
    with httpx.Client(base_url=found[1], timeout=60) as http:
        body: dict[str, object] = {"model": "four", "path": str(folder / "three")}
        body["config"] = {"page_size": 8}
        assert http.post("/v1/models/load", json=body).json() == {"model": "four", "added": True}
        wait_until(lambda: names(client) == ["one", "three", "four"])
        wait_until(lambda: all(model.ready for model in client.status().models))
        check_answer(client, "four", oracles["three"])
        listed = http.get("/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["one", "three", "four"]
        misspelt = {"page_sise": 8}
        for path, wrong, status, field in (
            ("load", body, 400, "model"),
            ("load", {**body, "model": "a b"}, 400, "model"),
            ("load", {"model": "five", "path": "/nowhere"}, 400, "path"),
            ("load", {**body, "model": "five", "config": misspelt}, 400, "models.five.page_sise"),
            ("load", {"model": "five"}, 400, "path"),
            ("unload", {"model": "two"}, 404, "model"),
        ):
            refused = http.post(f"/v1/models/{path}", json=wrong)
            assert refused.status_code == status, refused.text
            assert refused.json()["error"]["param"] == field
        removed = http.post("/v1/models/unload", json={"model": "four"})
        assert removed.json() == {"model": "four", "removed": True}
        wait_until(lambda: names(client) == ["one", "three"])


def test_the_last_model_stays(client: Client, serve: Serve) -> None:
    assert "one is removed" in serve.ask("model", "remove", "one")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        serve.ask("model", "remove", "three")
    assert "'three' is the only model" in refused.value.stderr
    assert names(client) == ["three"]
    assert client.generate(PROMPT, max_tokens=2).model == "three"

"""LoRA adapters through router, prefill process, NIXL and decode process: PEFT is the oracle."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from adapters import ALL, ATTENTION, change_tensors, save_adapter
from processes import ProcessCluster
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save
from transformers import PreTrainedModel
from typer.testing import CliRunner

from baton import Client, InvalidRequest, UnknownModel
from baton.cli.app import app
from baton.core.errors import InvalidAdapter

SETTINGS: list[dict[str, object]] = [
    {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    {"r": 6, "target_modules": ATTENTION, "use_rslora": True},
    {"r": 16, "lora_alpha": 3, "target_modules": ALL},
    {"r": 5, "target_modules": ["gate_proj", "down_proj"], "layers_to_transform": [0, 2]},
    {"r": 3, "target_modules": ["k_proj", "up_proj"], "rank_pattern": {"up_proj": 9}},
    {"r": 40, "lora_alpha": 20, "target_modules": ["o_proj"]},
    {"r": 2, "target_modules": ["down_proj"]},
    {"r": 12, "lora_alpha": 30, "target_modules": ["q_proj", "gate_proj"]},
    {"r": 7, "target_modules": ["v_proj", "up_proj"], "use_rslora": True},
    {"r": 24, "target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1]},
    {"r": 9, "target_modules": ALL, "layers_to_transform": [2]},
    {"r": 64, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]},
]
ANSWER = 16
SLOTS = 10
"""Of a worker, fewer than adapters: some are dropped and loaded again."""


class Saved:
    """The model and its adapters, on disk and in PEFT."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = save(TINY_MODELS["llama"], folder / "model")
        self.models = {"model": self.base}
        for seed, settings in enumerate(SETTINGS):
            adapter = save_adapter(self.base, folder / f"a{seed}", seed=seed, **settings)
            self.models[f"a{seed}"] = adapter
        shutil.copytree(folder / "a2", folder / "twin")


class Served:
    def __init__(self, saved: Saved, folder: Path, decode: int = 1, **changes: object) -> None:
        self.folder = folder
        self.base, self.models = saved.base, dict(saved.models)
        names = [*(name for name in self.models if name != "model"), "twin"]
        tree: dict[str, object] = {
            "adapters": {name: str(saved.folder / name) for name in names},
            "adapter_folders": [str(folder / "more")],
            "adapter_slots": SLOTS,
            "speculation": "ngram",
            "page_size": 4,
            "cache": {"responses": "exact"},
            "prefill": {"kv_memory": "4MiB", "chunk_tokens": 16, "threads": 1},
            "decode": {"kv_memory": "4MiB", "max_batch": 16, "threads": 1},
            **changes,
        }
        self.cluster = ProcessCluster(saved.folder / "model", folder, decode=decode, tree=tree)

    def add(self, folder: Path, seed: int, **settings: object) -> PreTrainedModel:
        return save_adapter(self.base, folder, seed=seed, **settings)

    def ask(self, asked: list[tuple[str, list[int]]]) -> list[list[int]]:
        """All at once: (model, prompt)"""

        def one(pair: tuple[str, list[int]]) -> list[int]:
            model, prompt = pair
            answer = client.generate(prompt, model=model, max_tokens=ANSWER, timeout=120)
            return list(answer.token_ids)

        with self.cluster.client() as client, ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(one, asked))

    def check(self, asked: list[tuple[str, list[int]]]) -> list[list[int]]:
        answers = self.ask(asked)
        for (model, prompt), answer in zip(asked, answers, strict=True):
            (chosen,) = choices_of_transformers(self.models[model], [prompt], [answer])
            assert answer == chosen, model
        return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def served(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(saved, tmp_path_factory.mktemp("adapters"))
    with served.cluster:
        yield served


def prompt(seed: int, length: int = 30) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def test_one_prompt_under_every_name_at_once(served: Served) -> None:
    """Up to ten adapters and the base share a step. Pages of one are not another's."""
    answers = served.check([(model, prompt(1)) for model in served.models])
    assert len({tuple(answer) for answer in answers}) >= len(answers) - 1
    served.cluster.wait_idle()
    assert served.check([(model, prompt(1)) for model in reversed(served.models)]) == answers[::-1]
    served.cluster.wait_idle()


def test_mixed_prompts(served: Served) -> None:
    names = list(served.models)
    asked = [(names[seed % len(names)], prompt(seed, 5 + 7 * seed)) for seed in range(2, 14)]
    served.check(asked)
    served.cluster.wait_idle()


def test_pages_and_answers_are_shared_by_what_an_adapter_holds(served: Served) -> None:
    asked = prompt(50, 40)
    with served.cluster.client() as client:

        def cached(model: str, tokens: int) -> int:
            answer = client.generate(asked, model=model, max_tokens=tokens)
            return answer.usage.cached_tokens

        assert cached("a2", 2) == 0
        assert cached("a3", 2) == 0
        assert cached("model", 2) == 0
        assert cached("twin", 3) >= 36
        assert cached("a2", 4) >= 36


def test_embeddings_are_the_adapters(served: Served) -> None:
    asked = prompt(60, 21)
    with served.cluster.client() as client:
        for name, model in served.models.items():
            (found,) = client.embed([asked], model=name, pooling="mean", normalize=False)
            with torch.no_grad():
                states = model(torch.tensor([asked]), output_hidden_states=True).hidden_states
            assert found == pytest.approx(states[-1][0].double().mean(0).tolist(), abs=1e-5), name
    served.cluster.wait_idle()


def test_names(served: Served) -> None:
    with served.cluster.client() as client, httpx.Client(
        base_url=f"http://{served.cluster.http}/v1"
    ) as http:  # fmt: skip
        models = {model.name: model.parent for model in client.models()}
        assert models["a0"] == "model"
        assert models["model"] == ""
        listed = {each["id"]: each.get("parent") for each in http.get("/models").json()["data"]}
        assert listed == {name: parent or None for name, parent in models.items()}
        assert http.get("/models/a1").json()["parent"] == "model"
        body = {"model": "a1", "prompt": prompt(1), "max_tokens": 3, "temperature": 0}
        answer = http.post("/completions", json=body).json()
        assert answer["model"] == "a1"
        unknown = http.post("/completions", json={**body, "model": "a99"})
        assert unknown.status_code == 404
        assert "'model', 'a0', 'a1'" in unknown.json()["error"]["message"]
        with pytest.raises(UnknownModel, match="'a9'"):
            client.generate(prompt(1), model="a99")


def test_adapters_come_and_go(served: Served) -> None:
    folder, asked = served.folder / "more" / "new", prompt(70, 40)
    with served.cluster.client() as client:
        for seed in (20, 21):  # the second replaces what the folder and the name held
            served.models["new"] = served.add(folder, seed)
            client.add_adapter("new", str(folder))
            served.check([("new", asked), ("a1", asked)])
        assert client.generate(asked, model="new", max_tokens=5).usage.cached_tokens >= 36
        remove_while_running(served, client, asked)
        with pytest.raises(UnknownModel, match="no adapter 'new'"):
            client.remove_adapter("new")
    served.cluster.wait_idle()


def remove_while_running(served: Served, client: Client, asked: list[int]) -> None:
    """The call returns after the answer, which is as before; the next request finds no name. The
    router says what runs then: the last tokens may still be on their way to this client."""
    tokens: list[int] = []

    def remove() -> int:
        client.remove_adapter("new")
        return sum(each.active_requests for each in client.status().workers)

    with ThreadPoolExecutor(1) as thread:
        stream = client.stream(asked, model="new", max_tokens=150)
        for delta in stream:
            if not tokens:
                removing = thread.submit(remove)
            tokens += delta.token_ids
        assert removing.result() == 0
    assert len(tokens) == 150
    assert [tokens] == choices_of_transformers(served.models["new"], [asked], [tokens])
    with pytest.raises(UnknownModel, match="no model 'new'"):
        client.generate(asked, model="new", max_tokens=3)


def test_bad_adapters_are_refused_and_disturb_nobody(served: Served) -> None:
    bad, outside = served.folder / "more" / "bad", served.folder / "outside"
    served.add(bad, 30)
    shutil.copytree(bad, outside)
    change_tensors(bad, q_proj_lora_A_weight=torch.full((4, 48), float("nan")))
    with served.cluster.client() as client:
        with pytest.raises(InvalidAdapter, match=r"cannot load the adapter: .*not finite"):
            client.add_adapter("bad", str(bad))
        with pytest.raises(InvalidAdapter, match="not below a folder"):
            client.add_adapter("bad", str(outside))
        with pytest.raises(InvalidRequest, match="is the model itself"):
            client.add_adapter("model", str(bad))
        with pytest.raises(UnknownModel):
            client.generate(prompt(1), model="bad")
    served.check([("a4", prompt(71)), ("model", prompt(71))])
    served.cluster.wait_idle()


def test_http_and_the_command(served: Served) -> None:
    folder = served.folder / "more" / "http"
    served.models["http"] = served.add(folder, 40)
    with httpx.Client(base_url=f"http://{served.cluster.http}/v1") as http:
        body = {"lora_name": "http", "lora_path": str(folder)}
        loaded = http.post("/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
        served.check([("http", prompt(72))])
        assert run_command(served, "list").splitlines()[-1] == "http"
        assert http.post("/load_lora_adapter", json={"lora_name": "x"}).status_code == 400
        removed = http.post("/unload_lora_adapter", json={"lora_name": "http"})
        assert removed.status_code == 200
        assert http.post("/unload_lora_adapter", json={"lora_name": "http"}).status_code == 404
    assert "again is served" in run_command(served, "add", "again", str(folder))
    assert run_command(served, "remove", "again") == "again is removed\n"


def run_command(served: Served, *arguments: str) -> str:
    command = ["adapter", *arguments, "--address", served.cluster.address]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


def decode_workers(served: Served, model: str) -> set[str]:
    """That requests go to, one after the other."""
    found = set()
    with served.cluster.client() as client:
        for seed in range(5):
            found.add(client.generate(prompt(seed), model=model, max_tokens=2).decode_worker)
            served.cluster.wait_idle()
    return found


def test_answers_continue_after_a_lost_worker(saved: Saved, tmp_path: Path) -> None:
    """Prefill has two ranks; pages are in files, too; only the first three adapters are loaded when
    a worker starts."""
    cache = {"files": str(tmp_path / "files")}
    prefill = {"kv_memory": "4MiB", "chunk_tokens": 16, "threads": 1, "tensor_parallel": 2}
    changes = {"cache": cache, "prefill": prefill, "speculation": "off", "adapter_slots": 3}
    served = Served(saved, tmp_path, decode=2, **changes)
    asked = [(name, prompt(80 + place, 24)) for place, name in enumerate(served.models)]
    with served.cluster as cluster:
        assert len(decode_workers(served, "a4")) == 1, "the one that has loaded it"
        before = served.check(asked)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(served.ask, [(m, p) for m, p in asked for _ in range(2)])
            time.sleep(0.3)
            cluster.workers["decode-0"].kill()
            after = running.result()
        assert after == [answer for answer in before for _ in range(2)]
        cluster.restart("decode-0")
        assert served.ask(asked) == before

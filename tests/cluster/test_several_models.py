"""Several models behind one router: a request runs on its model's workers alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from adapters import save_adapter
from processes import START_SECONDS, ProcessCluster, scrape
from text_model import save_text_model
from tiny_encoders import save_encoder
from tiny_models import choices_of_transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton import Client
from baton.core.errors import InvalidRequest, UnknownModel
from baton.v1 import open_inference_pb2 as oip
from baton.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

PROMPT = list(range(20, 60))
TEXT = "the name"
TOKENS = 20
NAMES = ["one", "org/two", "sql"]
POOLS: dict[str, object] = {
    "prefill": {"kv_memory": "4MiB", "threads": 1},
    "decode": {"kv_memory": "4MiB", "threads": 1},
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    """Two models of one shape, and an adapter of the second, by their names."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for seed, name in enumerate(("one", "org/two")):
        (folder / name).mkdir(parents=True)
        save_text_model(folder / name, seed)
        found[name] = AutoModelForCausalLM.from_pretrained(folder / name).eval()
    return {**found, "sql": save_adapter(found["org/two"], folder / "sql")}


@pytest.fixture(scope="module")
def cluster(
    oracles: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessCluster]:
    folder = Path(oracles["one"].name_or_path).parent
    workspace = tmp_path_factory.mktemp("cluster")
    models: dict[str, dict[str, object]] = {
        "one": {"model": str(folder / "one"), "page_size": 8},
        "org/two": {
            "model": str(folder / "org" / "two"),
            "adapters": {"sql": str(folder / "sql")},
        },
    }
    save_encoder(workspace / "mini")
    tree = {
        **POOLS,
        "batches": {"folder": str(workspace / "batches")},
        "embedding_model": str(workspace / "mini"),
    }
    with ProcessCluster(models, workspace, tree=tree) as made:
        yield made
        made.wait_idle()


def ask(client: Client, model: str) -> list[int]:
    answer = client.generate(PROMPT, model=model, max_tokens=TOKENS, ignore_eos=True)
    return list(answer.token_ids)


def test_each_answers_as_its_own_weights_do(
    cluster: ProcessCluster, oracles: dict[str, PreTrainedModel]
) -> None:
    """All at once, and again with pages cached: one prompt, and no page of another model."""
    with cluster.client() as client, ThreadPoolExecutor(len(NAMES)) as threads:
        for _ in range(2):
            for name, answer in zip(
                NAMES, threads.map(lambda name: ask(client, name), NAMES), strict=True
            ):
                assert [answer] == choices_of_transformers(oracles[name], [PROMPT], [answer]), name
        status = client.status()
    served = {each.member.worker_id: each.member.model for each in status.workers}
    assert served == {
        **dict.fromkeys(["prefill-0", "decode-0"], "one"),
        **dict.fromkeys(["prefill-1", "decode-1"], "org/two"),
    }
    assert [each.name for each in status.models] == ["one", "org/two"]
    # As many page sizes as models: their pools have nothing in common.
    assert len({each.total_pages for each in status.workers}) == 2


def test_models_are_listed_and_other_names_are_unknown(cluster: ProcessCluster) -> None:
    with cluster.client() as client:
        listed = {model.name: model.parent for model in client.models()}
        assert listed == {"one": "", "org/two": "", "sql": "org/two", "mini": ""}
        with pytest.raises(UnknownModel, match="serves 'one', 'org/two', 'sql', 'mini'"):
            ask(client, "three")
        with pytest.raises(InvalidRequest, match="several models are served; name one"):
            ask(client, "")
    with httpx.Client(base_url=f"http://{cluster.http}/v1") as http:
        models = http.get("/models").json()["data"]
        assert [each["id"] for each in models] == [*NAMES, "mini"]
        assert http.get("/models/org/two").json()["id"] == "org/two"
        unknown = http.post("/completions", json={"model": "three", "prompt": "x"})
        assert unknown.status_code == 404
        assert "serves 'one', 'org/two', 'sql'" in unknown.text


def test_every_api_finds_a_model_by_its_name(cluster: ProcessCluster) -> None:
    with cluster.client() as client:
        texts = {
            name: client.generate(TEXT, model=name, max_tokens=8, temperature=0.0).text
            for name in NAMES
        }
        vectors = {name: client.embed([TEXT], model=name)[0] for name in NAMES}
    assert len(set(texts.values())) == len({str(each) for each in vectors.values()}) == 3
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=f"http://{cluster.http}", timeout=60) as http:
        for name in NAMES:
            answer = http.post("/v1/completions", json={"model": name, **body}).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[name])
            embedded = http.post("/v1/embeddings", json={"model": name, "input": TEXT}).json()
            assert embedded["data"][0]["embedding"] == pytest.approx(list(vectors[name]), rel=1e-5)
            said = http.post("/v1/chat/completions", json={"model": name, **chat}).json()
            messages = http.post("/v1/messages", json={"model": name, **chat}).json()
            assert messages["content"][0]["text"] == said["choices"][0]["message"]["content"]
            counted = http.post("/tokenize", json={"model": name, "prompt": TEXT}).json()
            assert counted["count"] == answer["usage"]["prompt_tokens"]
    with grpc.insecure_channel(cluster.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for name in NAMES:
            assert stub.ModelReady(oip.ModelReadyRequest(name=name)).ready
            assert infer(stub, name) == TEXT + texts[name]


def infer(stub: GRPCInferenceServiceStub, name: str) -> str:
    asked = oip.ModelInferRequest(model_name=name)
    sampling = json.dumps({"temperature": "0", "max_tokens": 8})
    for field, value in (("text_input", TEXT), ("sampling_parameters", sampling)):
        tensor = asked.inputs.add(name=field, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value.encode())
    return stub.ModelInfer(asked).outputs[0].contents.bytes_contents[0].decode()


def test_ledgers_and_metrics_carry_the_model(cluster: ProcessCluster) -> None:
    with cluster.client() as client:
        before = scrape(cluster.metrics, "model")
        ask(client, "sql")
        latest, *_ = client.recent(1)
        assert latest.model == "sql"
        after = scrape(cluster.metrics, "model")
        diagnosed = {client.diagnose(model=name).model for name in ("one", "org/two")}
    assert diagnosed == {"one", "org/two"}
    counted = {
        name: after[f"baton_requests_total {name}"] - before[f"baton_requests_total {name}"]
        for name in ("one", "org/two")
    }
    assert counted == {"one": 0, "org/two": 1}


def test_the_embedding_model_is_found_beside_them(cluster: ProcessCluster) -> None:
    with cluster.client() as client:
        (vector,) = client.embed(["w1 w2"], model="mini")
        assert len(vector) == 32
        assert client.recent(1)[0].answers[0].prefill_worker == "prefill-0"
        with pytest.raises(InvalidRequest, match="embeds and cannot answer"):
            client.generate("w1", model="mini")


def test_lines_of_a_batch_run_on_their_models(cluster: ProcessCluster) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
    lines = [
        {"custom_id": name, "url": "/v1/completions", "body": {"model": name, **body}}
        for name in (*NAMES, "three")
    ]
    content = "\n".join(map(json.dumps, lines))
    with httpx.Client(base_url=f"http://{cluster.http}/v1", timeout=60) as http:
        texts = {
            name: http.post("/completions", json={"model": name, **body}).json()["choices"]
            for name in NAMES
        }
        upload = {"file": ("in.jsonl", content), "purpose": (None, "batch")}
        file = http.post("/files", files=upload).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/batches", json=asked).json()
        while batch["status"] != "completed":
            assert time.time() < batch["created_at"] + START_SECONDS, batch
            time.sleep(0.1)
            batch = http.get(f"/batches/{batch['id']}").json()
        answered = results(http, batch["output_file_id"])
        refused = results(http, batch["error_file_id"])
    assert {name: each["body"]["choices"] for name, each in answered.items()} == texts
    assert {name: each["status_code"] for name, each in refused.items()} == {"three": 404}


def results(http: httpx.Client, file: str) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, http.get(f"/files/{file}/content").text.splitlines())
    return {line["custom_id"]: line["response"] for line in lines}


def test_an_adapter_is_added_to_the_model_that_is_named(
    cluster: ProcessCluster, oracles: dict[str, PreTrainedModel]
) -> None:
    folder = str(Path(oracles["one"].name_or_path).parent / "sql")
    with cluster.client() as client:
        with pytest.raises(InvalidRequest, match="several models are served; name one"):
            client.add_adapter("more", folder)
        with pytest.raises(InvalidRequest, match="'one' is a model that is served"):
            client.add_adapter("one", folder, model="org/two")
        with httpx.Client(base_url=f"http://{cluster.http}/v1") as http:
            for name, base, field in (
                ("more", "", "base_model_name"),
                ("one", "org/two", "lora_name"),
            ):
                body = {"lora_name": name, "lora_path": folder, "base_model_name": base}
                refused = http.post("/load_lora_adapter", json=body)
                assert refused.status_code == 400, refused.text
                assert refused.json()["error"]["param"] == field
        client.add_adapter("more", folder, model="org/two")
        assert ask(client, "more") == ask(client, "sql")
        client.remove_adapter("more")
        with pytest.raises(UnknownModel):
            ask(client, "more")

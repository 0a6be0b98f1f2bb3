"""Batches with the OpenAI SDK on a real cluster: over a router's death, beside other requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch
from processes import ProcessCluster, scrape

from baton.core.metrics import GENERATION_TOKENS

MODEL = "shallow"
SECONDS = 120.0
STORY_TOKENS, LIVE_TOKENS, FIRST_CHUNKS = 60, 40, 4
NO_END = {"ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("batches")
    sizes = {"kv_memory": "64MiB", "threads": 1}
    tree: dict[str, object] = {
        "prefill": sizes,
        "decode": {**sizes, "max_batch": 2},  # two requests fill it
        "batches": {"folder": str(folder / "kept")},
    }
    with ProcessCluster(shallow, folder, tree=tree) as cluster:
        yield cluster


def start(client: openai.OpenAI, endpoint: str, bodies: dict[str, dict[str, object]]) -> Batch:
    lines = [
        {"custom_id": name, "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
        for name, body in bodies.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )


def wait(client: openai.OpenAI, batch: Batch, until: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + SECONDS
    while not until(batch):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def has_answers(batch: Batch) -> bool:
    return batch.request_counts is not None and batch.request_counts.completed > 0


def is_completed(batch: Batch) -> bool:
    assert batch.status in ("validating", "in_progress", "finalizing", "completed"), batch
    return batch.status == "completed"


def output(client: openai.OpenAI, batch: Batch) -> dict[str, dict[str, object]]:
    assert batch.output_file_id
    lines = client.files.content(batch.output_file_id).text.splitlines()
    found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def test_a_batch_outlives_its_router(cluster: ProcessCluster, tmp_path: Path) -> None:
    asked = {
        f"q{index}": {
            "messages": [{"role": "user", "content": f"Name {index} animals."}],
            "max_tokens": 6 * index,  # the first is answered long before the last
            "temperature": 0,
        }
        for index in range(2, 10)
    }
    with cluster.sdk() as client:
        batch = start(client, "/v1/chat/completions", asked)
        batch = wait(
            client, batch, lambda it: bool(it.request_counts and it.request_counts.completed)
        )
        assert batch.status == "in_progress"
    cluster.router.kill()
    cluster.start_router()
    with cluster.sdk() as client:
        batch = wait(client, batch, is_completed)
        answers = output(client, batch)
        assert answers.keys() == asked.keys()
        assert batch.request_counts
        assert (batch.request_counts.completed, batch.error_file_id) == (len(asked), None)
        for name in ("q2", "q9"):
            live = client.chat.completions.create(model=MODEL, **asked[name])  # type: ignore[call-overload]
            assert answers[name]["choices"] == [live.choices[0].model_dump(exclude_unset=True)]
    cluster.wait_idle()


@pytest.mark.parametrize(
    ("endpoint", "body", "said"),
    [
        ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 8}, "choices"),
        ("/v1/responses", {"input": "What is its capital?", "max_output_tokens": 16}, "output"),
    ],
)
def test_other_endpoints_are_served(
    endpoint: str, body: dict[str, object], said: str, cluster: ProcessCluster
) -> None:
    body = {"model": MODEL, "temperature": 0, **body}
    live = httpx.post(f"http://{cluster.http}{endpoint}", json=body, timeout=SECONDS).json()
    with cluster.sdk() as client:
        batch = start(client, endpoint, {"a": body})
        batch = wait(client, batch, is_completed)
        assert texts(output(client, batch)["a"][said]) == texts(live[said]) != []


def texts(answer: object) -> list[str]:
    """Every "text" in a JSON value."""
    if isinstance(answer, list):
        return [text for each in answer for text in texts(each)]
    if not isinstance(answer, dict):
        return []
    own = [answer["text"]] if isinstance(answer.get("text"), str) else []
    return own + texts(list(answer.values()))


def test_a_batch_pauses_for_another_request(cluster: ProcessCluster) -> None:
    """Counted in tokens, which no machine's speed changes."""
    told = {"prompt": "Once upon a time", "max_tokens": STORY_TOKENS, "temperature": 0.0}
    bodies = {f"story-{index}": {**told, **NO_END} for index in range(4)}
    with cluster.sdk() as client:
        alone = client.completions.create(model=MODEL, extra_body=NO_END, **told)  # type: ignore[call-overload]
        before = generated(cluster)
        batch = start(client, "/v1/completions", bodies)
        wait(client, batch, lambda _: generated(cluster) > before + 10)
        live = client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=LIVE_TOKENS, stream=True, extra_body=NO_END
        )
        chunks = iter(live)
        for _ in range(FIRST_CHUNKS):  # they come from the decode worker: the batch has paused
            next(chunks)
        before = generated(cluster)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert generated(cluster) - before <= LIVE_TOKENS
        batch = wait(client, batch, is_completed)
        stories = output(client, batch)
        assert [texts(stories[name]["choices"]) for name in bodies] == [[alone.choices[0].text]] * 4
    cluster.wait_idle()


def generated(cluster: ProcessCluster) -> float:
    return scrape(cluster.metrics)[GENERATION_TOKENS]

"""Pools that change while they serve a hub's model, from one start to its Ctrl-C: each test goes on
where the one before it has ended."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from serving import MODEST, START_SECONDS, Serve
from tiny_hub import TinyHub
from tiny_models import TINY_MODELS, generate_with_transformers, save

from baton import Answer, InvalidRequest, RoleRefused, Unavailable
from baton.v1.worker_pb2 import ROLE_PREFILL

NAME = "org/tiny"
PROMPTS = [[1, 2, 3], [7] * 40, [5, 4] * 30]
TOKENS = 100
DECODE = ["decode-0", "decode-1"]
PAUSE_SECONDS = 0.3
"""Between the answers to one prompt: starting processes need the machine too."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def expected(model: Path, hub: TinyHub) -> list[int]:
    """What transformers answers to the first prompt, by the model's defaults."""
    oracle = save(TINY_MODELS["llama"], model)
    plain = generate_with_transformers(oracle, PROMPTS[0], TOKENS)
    oracle.generation_config.repetition_penalty = 1.8
    oracle.generation_config.save_pretrained(model)
    hub.push(NAME, model)
    answer = generate_with_transformers(oracle, PROMPTS[0], TOKENS)
    assert answer != plain
    return answer


@pytest.fixture(scope="module")
def serve(
    hub: TinyHub, expected: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("serve")
    # The planner is there, and keeps its hands off.
    config = folder / "planner.yaml"
    planner = {"enabled": True, "act": False, "round_seconds": 0.5}
    config.write_text(yaml.safe_dump({"planner": planner, **MODEST}))
    flags = ["--config", str(config), "--model", NAME, "--kv-memory", "4MiB", "--dtype", "float32"]
    with Serve(folder, *flags, environment=hub.environment(folder / "home")) as cluster:
        yield cluster.ready()


@pytest.fixture(scope="module")
def unscaled(serve: Serve) -> list[list[int]]:
    """What the prompts are answered with before anything changes."""
    return [answer(serve, prompt).token_ids for prompt in PROMPTS]


def answer(serve: Serve, prompt: list[int]) -> Answer:
    with serve.client() as client:
        return client.generate(prompt, max_tokens=TOKENS, ignore_eos=True)


class Load:
    """Asks the same again and again, each prompt by itself, until told to stop."""

    def __init__(self, serve: Serve) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self.errors: list[Exception] = []
        self._serve = serve
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=[index]) for index in range(len(PROMPTS))
        ]

    def _ask(self, index: int) -> None:
        try:
            while True:
                self.answers.append((index, answer(self._serve, PROMPTS[index])))
                if self._stop.wait(PAUSE_SECONDS):
                    return
        except Exception as error:  # noqa: BLE001 whatever it is, the test must see it
            self.errors.append(error)

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()


def scale(serve: Serve, *flags: str) -> list[dict[str, list[dict[str, str]]]]:
    """Every step that `baton scale` shows."""
    lines = serve.ask("scale", *flags, "--json").splitlines()
    return [json.loads(line) for line in lines]


def names(serve: Serve) -> list[str]:
    with serve.client() as client:
        return [worker.worker_id for worker in client.pools().workers]


def check(load: Load, unscaled: list[list[int]]) -> None:
    assert not load.errors
    assert len(load.answers) >= len(PROMPTS)
    for index, found in load.answers:
        assert found.token_ids == unscaled[index]


def test_a_hubs_model_is_resolved_and_downloaded_once(
    serve: Serve, hub: TinyHub, model: Path, unscaled: list[list[int]], expected: list[int]
) -> None:
    """Also its defaults. Whoever starts from here on finds another commit at the hub."""
    assert f"Baton serves {NAME}." in serve.stdout
    assert "runs through transformers" not in serve.stdout
    assert "repetition_penalty" in serve.stdout
    assert list(unscaled[0]) == expected
    assert hub.requests.count(f"GET /api/models/{NAME}") == 1
    assert set(hub.downloads().values()) == {1}
    save(TINY_MODELS["llama"], model, seed=1)
    hub.push(NAME, model)


def test_a_terminated_decode_worker_drains_and_comes_back_with_the_same_commit(
    serve: Serve, unscaled: list[list[int]]
) -> None:
    """Nothing is retried: the answer ends before the worker does."""
    before = serve.worker("decode-0")
    with serve.client() as client:
        stream = client.stream(PROMPTS[0], max_tokens=200, ignore_eos=True)
        next(iter(stream))
        os.kill(before, signal.SIGTERM)
        whole = stream.read()
    assert (whole.usage.completion_tokens, len(whole.placements)) == (200, 1)
    serve.wait_for("decode-0 +ready", 2)
    serve.wait_whole()
    assert serve.worker("decode-0") != before
    assert [answer(serve, prompt).token_ids for prompt in PROMPTS] == unscaled


def test_pools_grow_under_load(serve: Serve, unscaled: list[list[int]]) -> None:
    load = Load(serve)
    with load.running():
        steps = scale(serve, "--prefill", "2", "--decode", "2")
        workers = {worker["worker_id"]: worker["progress"] for worker in steps[-1]["workers"]}
        assert workers == dict.fromkeys(["prefill-0", "decode-0", "prefill-1", "decode-1"], "ready")
    check(load, unscaled)


def test_a_pool_is_not_scaled_to_nothing(serve: Serve) -> None:
    with serve.client() as client:
        for most in (0, 100_000):
            with pytest.raises(InvalidRequest, match="decode workers: the limits are 1 and 1024"):
                client.scale(decode=most)
        pools = client.pools()
    assert (pools.prefill, pools.decode, len(pools.workers)) == (2, 2, 4)


def test_a_controller_that_was_killed_has_kept_the_pools(serve: Serve) -> None:
    pid = serve.actor("Controller")
    os.kill(pid, signal.SIGKILL)
    serve.wait_pools(2, 2)
    assert serve.actor("Controller") != pid
    assert names(serve) == ["prefill-0", "decode-0", "prefill-1", "decode-1"]
    serve.wait_whole(4)


def test_a_worker_changes_its_role_under_load(serve: Serve, unscaled: list[list[int]]) -> None:
    load = Load(serve)
    with load.running():
        assert serve.ask("role", "decode-1", "prefill").startswith("decode-1 is a prefill worker")
        serve.wait_pools(3, 1)
        serve.ask("role", "decode-1", "decode")
        serve.wait_pools(2, 2)
    check(load, unscaled)
    serve.wait_whole(4)


def test_two_changes_at_once_leave_a_worker_of_the_role(serve: Serve) -> None:
    def become_prefill(name: str) -> str:
        with serve.client() as client:
            try:
                client.switch_role(name, "prefill")
            except RoleRefused as refused:
                return refused.message
        return ""

    with ThreadPoolExecutor() as threads:
        refused = dict(zip(DECODE, threads.map(become_prefill, DECODE), strict=True))
    (left,) = [name for name, words in refused.items() if words]
    (changed,) = set(DECODE) - {left}
    assert refused[left].startswith(f"{left} is the last decode worker")
    serve.wait_pools(3, 1)
    serve.ask("role", changed, "decode")
    serve.wait_pools(2, 2)


def test_a_change_that_is_asked_for_twice_at_once_leaves_nobody_waiting(serve: Serve) -> None:
    def become_prefill(_: int) -> str:
        with serve.client() as client:
            try:
                client.switch_role("decode-1", "prefill", timeout=30.0)
            except (RoleRefused, Unavailable) as refused:
                return refused.message
        return ""

    with ThreadPoolExecutor() as threads:
        refused = list(threads.map(become_prefill, range(3)))
    assert "" in refused
    # While it changes, or once it has changed: whoever comes late finds it done.
    told = ("already being drained or switching its role", "is a prefill worker already")
    assert all(any(each in words for each in told) for words in refused if words)
    serve.wait_pools(3, 1)
    serve.ask("role", "decode-1", "decode")
    serve.wait_pools(2, 2)


def test_pools_that_are_scaled_at_the_same_time_are_both_scaled(serve: Serve) -> None:
    with serve.client() as client, ThreadPoolExecutor() as threads:
        client.pools()
        both = [threads.submit(client.scale, prefill=3), threads.submit(client.scale, decode=3)]
        for each in both:
            each.result()
        pools = client.pools()
        client.scale(prefill=2, decode=2)
    assert (pools.prefill, pools.decode) == (3, 3)
    serve.wait_pools(2, 2)


def plan_with(serve: Serve, text: str) -> list[str]:
    """What `baton plan` says once it says that: the planner looks again every few seconds."""
    deadline = time.monotonic() + START_SECONDS
    while text not in (told := serve.ask("plan")):
        assert time.monotonic() < deadline, told
    return told.splitlines()


def test_the_planner_says_what_it_sees(serve: Serve) -> None:
    with Load(serve).running():
        for prompt in PROMPTS:
            answer(serve, prompt)
        told = plan_with(serve, "answers/s")
    assert told[0].startswith("the planner only reports what it would do")
    assert "now" in told[1]


def test_a_worker_that_was_killed_comes_back_in_its_role(
    serve: Serve, unscaled: list[list[int]]
) -> None:
    serve.ask("role", "decode-1", "prefill")
    serve.wait_pools(3, 1)
    starts = len(re.findall("decode-1 +ready", serve.stdout))
    os.kill(serve.worker("decode-1"), signal.SIGKILL)
    serve.wait_for("decode-1 +ready", starts + 1)
    workers = {worker.member.worker_id: worker.member.role for worker in serve.wait_whole(4)}
    assert workers["decode-1"] == ROLE_PREFILL
    assert answer(serve, PROMPTS[0]).token_ids == unscaled[0]
    serve.ask("role", "decode-1", "decode")
    serve.wait_pools(2, 2)


def test_workers_leave_under_load(serve: Serve, unscaled: list[list[int]]) -> None:
    load = Load(serve)
    with load.running():
        assert serve.ask("drain", "prefill-0") == "prefill-0 is drained\n"
        # It is wanted no more.
        serve.wait_pools(1, 2)
        steps = scale(serve, "--decode", "1")
        assert [worker["progress"] for worker in steps[-1]["workers"]] == ["ready", "ready"]
    check(load, unscaled)
    serve.wait_whole(2)
    told = serve.wait_for("prefill-0 +drained")
    after = re.split("prefill-0 +drained", told, maxsplit=1)[1]
    assert not re.search("prefill-0 +ready", after), "it came back"


def test_ctrl_c_lets_answers_end_and_ends_every_worker(
    serve: Serve, unscaled: list[list[int]]
) -> None:
    """Also one that is just starting, and while there is no controller."""
    serve.ask("scale", "--decode", "2", "--no-wait")
    # Names are given once.
    serve.wait_for("decode-3 +importing torch")
    os.kill(serve.actor("Controller"), signal.SIGKILL)
    with (
        serve.client() as client,
        client.stream(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True) as stream,
    ):
        next(stream)
        serve.send(signal.SIGINT)
        assert stream.read().token_ids == unscaled[0]
    assert (serve.wait(), serve.stderr) == (0, "")
    serve.wait_gone()

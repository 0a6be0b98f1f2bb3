"""Whether an answer depends on anything but its request.

    python -m bench.same [--model FOLDER] [--dtype bfloat16] [--answers 40] [--tokens 100]

Every prompt is answered alone, on an idle cluster, and then in other ways: again (its prefix is
cached), beside all others, with other chunk and page sizes, while a worker is killed, after a
role switch. The table counts the answers that differ from the one given alone, by tokens and by
log probabilities, and where the first difference is. Needs no Ray; runs on a CPU or a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton import Client
from baton.core.model_store import EMBEDDED
from baton.v1 import worker_pb2
from bench.processes import FREE_ROUTER, Process, address_in, start

SUBJECTS = ("rivers", "bread", "the moon", "trains", "bees", "glass", "chess", "rain", "salt")
REQUESTS = (
    "Explain {} to a child.",
    "Write three facts about {}.",
    "Tell a short story about {} and a fox.",
    "Why do people care about {}? Answer in one paragraph, then list two books.",
    "Compare {} with {}.",
)
READY_SECONDS = 240.0
LAYOUTS = ((8, 64), (32, 200))
"""Other page sizes, with other chunk sizes."""


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """How each prompt is sampled."""

    tokens: int
    temperature: float
    n: int
    presence_penalty: float


class Cluster:
    """Two prefill workers, two decode workers and a router, as processes."""

    def __init__(self, tree: dict[str, object], folder: Path) -> None:
        self._tree = tree
        self._folder = folder
        self._running = contextlib.ExitStack()
        self.workers: dict[str, Process] = {}

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as running:
            config = self._write("workers", [])
            for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
                module = f"baton.{name.partition('-')[0]}_worker"
                arguments = ("--config", config, "--name", name)
                self.workers[name] = running.enter_context(
                    start(self._folder, name, module, *arguments)
                )
            members = [address_in(worker.log) for worker in self.workers.values()]
            router = running.enter_context(
                start(
                    *(self._folder, "router", "baton.router"),
                    *("--config", self._write("router", members)),
                )
            )
            self.client = running.enter_context(Client(address_in(router.log)))
            self.client.wait_ready(READY_SECONDS)
            self._wait_connected()
            self._running = running.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def kill(self, name: str) -> None:
        os.kill(self.workers[name].pid, signal.SIGKILL)

    def _write(self, name: str, members: list[str]) -> str:
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**self._tree, "members": {"workers": members}}))
        return str(path)

    def _wait_connected(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            workers = self.client.status().workers
            prefill = [each for each in workers if each.member.role == worker_pb2.ROLE_PREFILL]
            if len(prefill) == 2 and all(len(each.connected) == 2 for each in prefill):
                return
            time.sleep(0.2)
        raise SystemExit("not all workers are connected")


def prompts(count: int) -> list[str]:
    """Different prompts of different lengths."""
    made = []
    for index in range(count):
        request = REQUESTS[index % len(REQUESTS)]
        subject = SUBJECTS[index % len(SUBJECTS)]
        other = SUBJECTS[(index // 3) % len(SUBJECTS)]
        context = "Keep it simple. " * (index * 7 % 40)
        made.append(f"{context}{request.format(subject, other)} ({index})")
    return made


def ask(client: Client, prompt: str, index: int, salt: str, settings: Settings) -> list[Answer]:
    answer = client.chat(
        [("user", prompt)],
        max_tokens=settings.tokens,
        temperature=settings.temperature,
        presence_penalty=settings.presence_penalty,
        n=settings.n,
        seed=1000 + index,
        logprobs=0,
        ignore_eos=True,
        cache_salt=salt,
    )
    return [
        Answer(choice.token_ids, tuple(each.chosen.logprob for each in choice.logprobs))
        for choice in answer.choices
    ]


class Asker:
    """Asks all prompts, one after the other or all at once."""

    def __init__(self, texts: list[str], settings: Settings) -> None:
        self._texts = texts
        self._settings = settings

    def alone(self, client: Client, salt: str) -> list[Answer]:
        return [answer for each in self._jobs(client, salt) for answer in each()]

    def at_once(
        self, client: Client, salt: str, meanwhile: Callable[[], None] | None = None
    ) -> list[Answer]:
        with ThreadPoolExecutor(len(self._texts)) as pool:
            futures = [pool.submit(job) for job in self._jobs(client, salt)]
            if meanwhile is not None:
                meanwhile()
            return [answer for future in futures for answer in future.result()]

    def _jobs(self, client: Client, salt: str) -> Iterator[Callable[[], list[Answer]]]:
        for index, text in enumerate(self._texts):
            yield functools.partial(ask, client, text, index, salt, self._settings)


def ways(
    tree: dict[str, object],
    asker: Asker,
    folder: Path,
    kill_after: float,
    layouts: Sequence[tuple[int, int]] = LAYOUTS,
) -> Iterator[tuple[str, list[Answer]]]:
    """The answers, asked in each way; the first is the one that others are compared with."""
    with Cluster(tree, folder) as cluster:
        client = cluster.client
        yield "alone", asker.alone(client, "a")
        yield "again, cached", asker.alone(client, "a")
        yield "all at once", asker.at_once(client, "b")
        yield "all at once, cached", asker.at_once(client, "b")
        client.switch_role("prefill-1", "decode")
        yield "after a role switch", asker.at_once(client, "c")

        def kill() -> None:
            time.sleep(kill_after)
            cluster.kill("decode-1")

        yield "a worker killed", asker.at_once(client, "d", kill)
    for page_size, chunk in layouts:
        pool = {"chunk_tokens": chunk}
        changed = {**tree, "page_size": page_size}
        for role in ("prefill", "decode"):
            changed[role] = {**dict(tree[role]), **pool}  # type: ignore[call-overload]
        with Cluster(changed, folder) as cluster:
            yield f"pages of {page_size}, chunks of {chunk}", asker.at_once(cluster.client, "a")


def row(way: str, wanted: list[Answer], found: list[Answer]) -> str:
    pairs = list(zip(wanted, found, strict=True))
    firsts = [
        next(
            (place for place, (a, b) in enumerate(zip(*ids, strict=False)) if a != b),
            min(map(len, ids)),
        )
        for ids in ((a.token_ids, b.token_ids) for a, b in pairs)
        if ids[0] != ids[1]
    ]
    scores = sum(a.logprobs != b.logprobs for a, b in pairs)
    where = (
        f"{min(firsts)} to {max(firsts)}, median {statistics.median(firsts):g}" if firsts else ""
    )
    return f"{way:<32}{len(firsts):>5} of {len(pairs):<6}{scores:>5} of {len(pairs):<6}{where}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=EMBEDDED, help="a folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="1GiB", help="of each worker")
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--kill-after", type=float, default=3.0, help="seconds")
    options = parser.parse_args()
    pool = {"kv_memory": options.kv_memory}
    tree: dict[str, object] = {
        "model": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "prefill": pool,
        "decode": pool,
        "router": {**FREE_ROUTER},
        "log_level": "warning",
    }
    for temperature in options.temperatures:
        settings = Settings(options.tokens, temperature, options.n, options.presence_penalty)
        asker = Asker(prompts(options.answers), settings)
        print(f"temperature {temperature:g}, {options.tokens} tokens, dtype {options.dtype}")
        print(f"{'':<32}{'tokens differ':<15}{'scores differ':<16}first difference at token")
        with tempfile.TemporaryDirectory() as folder:
            answers = ways(tree, asker, Path(folder), options.kill_after)
            _, wanted = next(answers)
            for way, found in answers:
                print(row(way, wanted, found), flush=True)


if __name__ == "__main__":
    main()

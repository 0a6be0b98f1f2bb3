"""Checks that answers depend on nothing but their requests.

    python -m bench.same [--model FOLDER] [--dtype bfloat16] [--answers 40] [--tokens 100]
                         [--numerics fast]

Every prompt is answered alone, on an idle cluster, and then in other ways: again (its prefix is
cached), beside all others, with other chunk and page sizes, while a worker is killed, after a
role switch. The table counts the answers that differ from the one given alone, by tokens and by
log probabilities, and gives the places of the first differences. Needs no Ray; runs on a CPU or a
GPU.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from baton import Client
from baton.core.model_store import EMBEDDED
from bench.processes import FREE_ROUTER, Process, router, workers

SUBJECTS = ("rivers", "bread", "the moon", "trains", "bees", "glass", "chess", "rain", "salt")
REQUESTS = (
    "Explain {} to a child.",
    "Write three facts about {}.",
    "Tell a short story about {} and a fox.",
    "Why do people care about {}? Answer in one paragraph, then list two books.",
    "Compare {} with {}.",
)
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LAYOUTS = ((8, 64), (32, 200))
"""Other page sizes, with other chunk sizes."""


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """The sampling settings of all prompts."""

    tokens: int
    temperature: float
    n: int
    presence_penalty: float


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
    """Sends all prompts, one after the other or all at once."""

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
    client: Client, asker: Asker, kill: Callable[[], None]
) -> Iterator[tuple[str, list[Answer]]]:
    """Yields the answers of two prefill and two decode workers in each way. The others are compared
    with the first. `kill` is called while all run, and kills decode-1."""
    yield "alone", asker.alone(client, "a")
    yield "again, cached", asker.alone(client, "a")
    yield "all at once", asker.at_once(client, "b")
    yield "all at once, cached", asker.at_once(client, "b")
    client.switch_role("prefill-1", "decode")
    yield "after a role switch", asker.at_once(client, "c")
    yield "a worker killed", asker.at_once(client, "d", kill)


def on_clusters(
    tree: dict[str, object], asker: Asker, folder: Path, kill_after: float
) -> Iterator[tuple[str, list[Answer]]]:
    """As `ways`, on a new cluster; then all at once on clusters with other layouts."""
    with cluster(tree, folder) as (client, started):

        def kill() -> None:
            time.sleep(kill_after)
            os.kill(started["decode-1"].pid, signal.SIGKILL)

        yield from ways(client, asker, kill)
    for page_size, chunk in LAYOUTS:
        changed = {**tree, "page_size": page_size}
        for role in ("prefill", "decode"):
            changed[role] = {**dict(tree[role]), "chunk_tokens": chunk}  # type: ignore[call-overload]
        with cluster(changed, folder) as (client, _):
            yield f"pages of {page_size}, chunks of {chunk}", asker.at_once(client, "a")


@contextlib.contextmanager
def cluster(tree: dict[str, object], folder: Path) -> Iterator[tuple[Client, dict[str, Process]]]:
    with (
        workers(folder, tree, WORKERS) as started,
        router(folder, tree, started.values()) as door,
        Client(door.address) as client,
    ):
        yield client, started


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
    parser.add_argument("--numerics", default="invariant", help="numerics of a GPU")
    parser.add_argument("--kv-memory", default="1GiB", help="memory for pages of each worker")
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
        "numerics": options.numerics,
        "prefill": pool,
        "decode": pool,
        "router": {**FREE_ROUTER},
        "log_level": "warning",
    }
    for temperature in options.temperatures:
        settings = Settings(options.tokens, temperature, options.n, options.presence_penalty)
        asker = Asker(prompts(options.answers), settings)
        print(
            f"temperature {temperature:g}, {options.tokens} tokens, dtype {options.dtype},"
            f" {options.numerics}"
        )
        print(f"{'':<32}{'tokens differ':<15}{'scores differ':<16}first difference at token")
        with tempfile.TemporaryDirectory() as folder:
            answers = on_clusters(tree, asker, Path(folder), options.kill_after)
            _, wanted = next(answers)
            for way, found in answers:
                print(row(way, wanted, found), flush=True)


if __name__ == "__main__":
    main()

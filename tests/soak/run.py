"""Rounds of the soak test, and their report.

    PYTHONPATH=tests/support python -m tests.soak.run --seconds 3600 --seed 1

A round draws a cluster by its seed, notes the undisturbed answers of a mix of requests, asks them
again while faults.py strikes, then checks that answers are the same and nothing is left behind.
A round that fails is repeated by its seed: --seed N --seconds S runs the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from adapters import save_adapter
from network import ENTER, own_loopback, why_not
from ray_nodes import TOKEN
from serving import Serve, processes_of
from transformers import AutoModelForCausalLM

from baton import AsyncClient
from baton.core.model_store import EMBEDDED, locate
from baton.v1.cluster_pb2 import WorkerStatus
from tests.soak import leaks
from tests.soak.mix import Mix, Routers

ROUND_SECONDS = 600.0
QUESTIONS, CLIENTS = 24, 6
WORKERS = 4
QUIET_SECONDS = 120.0
ACTOR = re.compile("ray::(Worker|Router|Controller)")


@dataclass
class Round:
    """What a round drew and found; `problems` is empty when it was sound."""

    seed: int
    settings: dict[str, object]
    answers: dict[str, int] = field(default_factory=dict)
    strikes: list[str] = field(default_factory=list)
    climbed: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def settings_of(seed: int) -> dict[str, object]:
    draw = random.Random(seed)
    chosen: dict[str, object] = {
        "speculation": draw.choice(["off", "ngram"]),
        "kv_dtype": draw.choice(["auto", "int8", "int4"]),
        "quantization": draw.choice(["none", "int8"]),
    }
    cache: dict[str, object] = {"responses": draw.choice(["off", "exact"])}
    if draw.random() < 0.5:
        cache["host_memory"] = "64MiB"
    return {**chosen, "cache": cache}


def write_config(folder: Path, seed: int, redis: str) -> Path:
    settings = settings_of(seed)
    cache = settings["cache"]
    assert isinstance(cache, dict)
    if cache["responses"] == "exact":
        cache = {**cache, "redis": redis}
    # A GPU to Ray is a slot of a node here.
    pool = {"workers": 2, "gpus": 1, "threads": 1, "kv_memory": "128MiB"}
    tree = {
        **settings,
        "cache": cache,
        "dtype": "float32",
        "device": "cpu",
        "insecure": True,
        "prefill": pool,
        "decode": {**pool, "nice": 0},
        "router": {"placement_timeout": 240.0},
        "batches": {"folder": str(folder / "batches")},
        "adapters": {"lora": str(folder / "lora")},
        "drain_seconds": 5.0,
    }
    path = folder / "baton.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Faults:
    """faults.py as a child process."""

    def __init__(self, folder: Path, *, cuts: bool) -> None:
        command = [sys.executable, "-m", "tests.soak.faults", "--folder", str(folder)]
        command += ["--cut"] if cuts else []
        self._sessions = folder / "sessions"
        # So that its Ray, and all that runs on it, has its temporary files there.
        environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.redis, self.ray = self._line().split()

    def processes(self) -> dict[int, str]:
        """Of all nodes, by title."""
        sessions = map(int, self._sessions.read_text().split())
        return {pid: title for each in sessions for pid, title in processes_of(each).items()}

    def begin(self, seed: int, seconds: float) -> None:
        self._send(f"{seed} {seconds}")

    def end(self) -> list[str]:
        """Returns the strikes when the last of them is over."""
        self._send("")
        strikes = []
        while (line := self._line()) != "quiet":
            strikes.append(line)
        return strikes

    def close(self) -> None:
        assert self._popen.stdin
        self._popen.stdin.close()
        self._popen.wait()

    def _send(self, line: str) -> None:
        assert self._popen.stdin
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()

    def _line(self) -> str:
        assert self._popen.stdout
        line = self._popen.stdout.readline()
        assert line, "faults.py has ended"
        return line.strip()


@contextmanager
def striking(folder: Path, *, cuts: bool) -> Iterator[Faults]:
    faults = Faults(folder, cuts=cuts)
    try:
        yield faults
    finally:
        faults.close()


async def wait_idle(address: str) -> list[str]:
    """What is not as it should be when nothing is asked; empty once all is."""
    deadline = time.monotonic() + QUIET_SECONDS
    async with AsyncClient(address) as client:
        while True:
            workers = list((await client.status()).workers)
            wrong = [found for worker in workers for found in not_idle(worker)]
            if len(workers) != WORKERS:
                wrong.append(f"{len(workers)} workers instead of {WORKERS}")
            if not wrong or time.monotonic() > deadline:
                return wrong
            await asyncio.sleep(0.5)


def not_idle(worker: WorkerStatus) -> Iterator[str]:
    name, load = worker.member.worker_id, worker.load
    if not worker.attached or worker.fault:
        yield f"{name} does not serve: {worker.fault or 'not attached'}"
    elif load.free_pages != worker.total_pages:
        held = worker.total_pages - load.free_pages
        yield f"{name} holds {held} pages, {load.quarantined_pages} of them in quarantine"


async def watch_memory(
    faults: Faults, samples: dict[int, list[int]], titles: dict[int, str]
) -> None:
    while True:
        for pid, held in leaks.measure(faults.processes()).items():
            samples.setdefault(pid, []).append(held.memory)
            titles[pid] = held.title
        await asyncio.sleep(2.0)


async def disturb(serve: Serve, faults: Faults, found: Round, seconds: float, gap: float) -> None:
    grpc = re.findall(r"gRPC +(\S+)", serve.stdout)
    http = re.findall(r"(http://\S+?)/?\s", serve.stdout)[: len(grpc)]
    routers = Routers(grpc, http)
    mix = Mix(routers, found.seed, QUESTIONS, "lora")
    await mix.prepare()
    found.problems += await wait_idle(grpc[0])
    before = leaks.measure(faults.processes())
    samples: dict[int, list[int]] = {}
    titles: dict[int, str] = {}
    watching = asyncio.create_task(watch_memory(faults, samples, titles))
    faults.begin(found.seed, gap)
    await mix.run(CLIENTS, seconds)
    found.strikes = await asyncio.to_thread(faults.end)
    watching.cancel()
    found.answers, found.problems = dict(mix.outcomes), [*found.problems, *mix.wrong]
    await routers.close()
    for address in grpc:
        found.problems += await wait_idle(address)
    found.problems += leaks.grown(before, leaks.measure(faults.processes()))
    climbed = {f"{titles[pid]} ({pid})": leaks.climbs(sizes) for pid, sizes in samples.items()}
    found.climbed = {name: size for name, size in climbed.items() if size > 0}
    found.problems += [
        f"{name}: {size:,} bytes more in the second half of its life"
        for name, size in climbed.items()
        if size > leaks.MORE_MEMORY
    ]


def run_round(seed: int, seconds: float, gap: float, *, cuts: bool) -> Round:
    found = Round(seed, settings_of(seed))
    # Short, since sockets of Ray have their names in it.
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as name:
        folder, temporary = Path(name), Path(name) / "tmp"
        temporary.mkdir()
        save_adapter(AutoModelForCausalLM.from_pretrained(locate(EMBEDDED)), folder / "lora", r=2)
        shared = leaks.shared_files()
        with striking(folder, cuts=cuts) as faults:
            config = write_config(folder, seed, faults.redis)
            flags = ("--config", str(config), "--routers", "2", "--ray-address", faults.ray)
            environment = {**TOKEN, "TMPDIR": str(temporary)}
            with Serve(folder / "serve", *flags, environment=environment) as serve:
                asyncio.run(disturb(serve.ready(), faults, found, seconds, gap))
                found.problems += stop(serve, faults)
        found.problems += [f"/dev/shm/{each} was left" for each in leaks.shared_files() - shared]
        found.problems += [f"{each} was left in TMPDIR" for each in leaks.left_in(temporary)]
    return found


def stop(serve: Serve, faults: Faults) -> list[str]:
    """Ends the cluster as Ctrl-C does; what that leaves behind."""
    serve.send(signal.SIGINT)
    code = serve.wait()
    try:
        serve.wait_gone()
    except AssertionError as error:
        return [str(error)]
    actors = [title for title in faults.processes().values() if ACTOR.match(title)]
    return [f"baton serve ended with {code}"] * bool(code) + [f"{each} was left" for each in actors]


def enter_namespace(*, inside: bool) -> None:
    """Starts this program again where its network can be cut, if that is permitted."""
    if inside:
        own_loopback()
    elif reason := why_not():
        print(f"no process is cut off: that needs user namespaces: {reason}", flush=True)
    else:
        again = [sys.executable, "-m", "tests.soak.run", "--inside", *sys.argv[1:]]
        # The first process there must reap those whose parents were killed: a shell does.
        os.execvp(ENTER[0], [*ENTER, "sh", "-c", '"$@"; exit $?', "sh", *again])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--gap", type=float, default=8.0, help="mean seconds between strikes")
    parser.add_argument("--report", type=Path, default=Path("build/soak.json"))
    parser.add_argument("--inside", action="store_true", help="this is a namespace of its own")
    options = parser.parse_args()
    enter_namespace(inside=options.inside)
    rounds: list[Round] = []
    end = time.monotonic() + options.seconds
    while (left := end - time.monotonic()) > 0:
        seed, seconds = options.seed + len(rounds), min(left, ROUND_SECONDS)
        found = run_round(seed, seconds, options.gap, cuts=options.inside)
        rounds.append(found)
        print_round(found)
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps([asdict(each) for each in rounds], indent=1))
    sys.exit(any(each.problems for each in rounds))


def print_round(found: Round) -> None:
    print(f"seed {found.seed}: {found.settings}")
    print(f"  {len(found.strikes)} strikes; {sum(found.answers.values())} answers: {found.answers}")
    for problem in found.problems:
        print(f"  PROBLEM {problem}")
    print("  sound" if not found.problems else "", flush=True)


if __name__ == "__main__":
    main()

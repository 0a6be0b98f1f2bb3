"""Both phases on one GPU: how much prefill delays running answers, for each way to share it.

    python -m bench.sharing --model FOLDER [--random-weights] [--ways colocated sliced 60 …]

Some streams generate long answers while long prompts arrive at a steady rate. Each way to
share the GPU gets fresh processes, without Ray, and the requests are sent over gRPC:

- colocated: one worker runs both phases, a chunk of a prompt in each step (colocated:N sets its
  tokens);
- sliced: a prefill and a decode process that take turns on the GPU, which is CUDA's default;
- P, a number: both side by side, prefill on P percent of the GPU's multiprocessors.

It prints the gaps between two tokens of the streams, alone and while prompts arrive, the
prompts' times to first token, and the rate of prompt tokens when many prompts wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton import AsyncClient
from baton.worker import resources
from bench.processes import FREE_ROUTER, router, workers

WORDS = 30_000
STREAM_PROMPT = 512
PROMPT_ANSWER = 8
SETTLE_SECONDS = 1.0
BURST = 6


@dataclass(frozen=True)
class Way:
    """How one GPU is shared."""

    name: str
    chunk: int = 0
    split: bool = True
    share: float | None = None  # prefill's share of the multiprocessors

    @classmethod
    def parse(cls, name: str) -> Way:
        if name == "sliced":
            return cls(name)
        if name.startswith("colocated"):
            _, _, chunk = name.partition(":")
            return cls(name, chunk=int(chunk or 0), split=False)
        return cls(name, share=float(name) / 100)


@dataclass
class Measured:
    alone: list[float]  # gaps between tokens, ms
    disturbed: list[float]
    first_tokens: list[float]  # TTFT of the prompts, ms
    prompt_rate: float  # prompt tokens per second while several wait


class Streams:
    """Running answers, and the gaps between their tokens."""

    def __init__(self, client: AsyncClient, count: int, answer: int) -> None:
        self._client = client
        self._answer = answer
        self.gaps: list[float] = []
        self._to_start = count
        self._all_started = asyncio.Event()
        self.tasks = [asyncio.create_task(self._write()) for _ in range(count)]

    async def _write(self) -> None:
        prompt = random.choices(range(5, WORDS), k=STREAM_PROMPT)
        last = 0.0
        async with self._client.stream(prompt, max_tokens=self._answer, ignore_eos=True) as stream:
            async for delta in stream:
                now = time.perf_counter()
                if last:
                    self.gaps += [(now - last) * 1e3] + [0.0] * (len(delta.token_ids) - 1)
                else:
                    self._start()
                last = now

    def _start(self) -> None:
        self._to_start -= 1
        if not self._to_start:
            self._all_started.set()

    async def started(self) -> None:
        """Returns when all have their first token; raises if one failed."""
        waiting = asyncio.create_task(self._all_started.wait())
        ended, _ = await asyncio.wait([waiting, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    async def during(self, seconds: float) -> list[float]:
        """The gaps during the next seconds."""
        self.gaps.clear()
        await asyncio.sleep(seconds)
        return list(self.gaps)


async def first_token(client: AsyncClient, length: int) -> float:
    """Milliseconds to an answer's first token. Reads the whole answer."""
    began = time.perf_counter()
    prompt = random.choices(range(5, WORDS), k=length)
    async with client.stream(prompt, max_tokens=PROMPT_ANSWER, ignore_eos=True) as stream:
        await anext(aiter(stream))
        taken = time.perf_counter() - began
        await stream.read()
    return taken * 1e3


async def measure(address: str, options: argparse.Namespace) -> Measured:
    async with AsyncClient(address) as client:
        for _ in range(3):
            await first_token(client, options.prompt)
        streams = Streams(client, options.streams, 2 * options.prompt - STREAM_PROMPT)
        await streams.started()
        await asyncio.sleep(SETTLE_SECONDS)
        alone = await streams.during(options.seconds / 4)
        prompts = asyncio.create_task(_arrivals(client, options))
        disturbed = await streams.during(options.seconds)
        first_tokens = await prompts
        began = time.perf_counter()
        await asyncio.gather(*(first_token(client, options.prompt) for _ in range(BURST)))
        rate = BURST * options.prompt / (time.perf_counter() - began)
        for task in streams.tasks:
            task.cancel()
        await asyncio.gather(*streams.tasks, return_exceptions=True)
        return Measured(alone, disturbed, first_tokens, rate)


async def _arrivals(client: AsyncClient, options: argparse.Namespace) -> list[float]:
    """Sends prompts at a steady rate, an open loop."""
    asked = []
    for _ in range(int(options.seconds * options.rate)):
        asked.append(asyncio.create_task(first_token(client, options.prompt)))
        await asyncio.sleep(1 / options.rate)
    return await asyncio.gather(*asked)


@contextlib.contextmanager
def cluster(way: Way, options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Starts a cluster whose workers share the GPU this way. Yields the router's address."""
    with contextlib.ExitStack() as running:
        shared: dict[str, str] = {}
        if way.share:
            pipes = Path(running.enter_context(tempfile.TemporaryDirectory()))
            shared = running.enter_context(resources.mps_service(pipes))
        names = ["decode-0", "prefill-0"] if way.split else ["decode-0"]
        tree = _tree(way, options)
        members = running.enter_context(workers(folder, tree, names, shared)).values()
        yield running.enter_context(router(folder, tree, members)).address


def _tree(way: Way, options: argparse.Namespace) -> dict[str, object]:
    return {
        "model": str(options.model),
        "weights": "random" if options.random_weights else "files",
        "device": options.device,
        "max_context": 2 * options.prompt,
        "prefill": {"kv_memory": options.kv_memory, "gpu_share": way.share or 1.0},
        "decode": {"kv_memory": options.kv_memory, "chunk_tokens": way.chunk, "max_batch": 64},
        "router": {
            **FREE_ROUTER,
            "local_prefill": "fallback",
            "local_prefill_after": 0,
        },
    }


def row(name: str, found: Measured) -> str:
    cells = []
    for gaps in (found.alone, found.disturbed):
        cells += [statistics.median(gaps), _percentile(gaps, 99), max(gaps)]
    cells += [statistics.median(found.first_tokens), max(found.first_tokens)]
    return (
        f"{name:<16}" + "".join(f"{cell:>9.1f}" for cell in cells) + f"{found.prompt_rate:>12,.0f}"
    )


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--ways", nargs="+", default=["colocated:512", "colocated:2048", "sliced", "50", "60", "80"]
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of an arriving prompt")
    parser.add_argument("--rate", type=float, default=1.0, help="prompts per second")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--kv-memory", default="24GiB")
    options = parser.parse_args()
    heads = ("p50", "p99", "max") * 2 + ("p50", "max")
    lines = [
        f"{'ITL alone, ms':>43}{'while prompts arrive':>27}{'prompt TTFT, ms':>18}{'prompts':>12}",
        f"{'way':<16}" + "".join(f"{head:>9}" for head in heads) + f"{'tok/s':>12}",
    ]
    for name in options.ways:
        with (
            tempfile.TemporaryDirectory() as folder,
            cluster(Way.parse(name), options, Path(folder)) as address,
        ):
            lines.append(row(name, asyncio.run(measure(address, options))))
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()

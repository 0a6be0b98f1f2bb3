"""What disaggregation adds to a first token: two worker processes against one, through a router.

    python -m bench.handoff --model FOLDER [--random-weights] [--lengths 512 2048 8192]

Starts, without Ray, a router with a prefill and a decode worker, and a second
router with one worker that does both. Sends both, in turn and over gRPC, random
prompts of the same lengths, and prints the medians of the time to the first token
and of the time from the first to the second, which includes the handoff. FOLDER
holds a config and a tokenizer; weights too, unless --random-weights is given.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from baton import Client
from bench.processes import FREE_ROUTER, router, workers

ANSWER = 8
WORDS = 30_000


@contextlib.contextmanager
def clusters(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Client, Client]]:
    """Clients of a split cluster and of a single worker that runs both phases."""
    tree = _tree(options)
    with workers(folder, tree, ("prefill-0", "decode-0", "decode-1")) as started:
        prefill, decode, both = started.values()
        with (
            router(folder, tree, [prefill, decode], "split") as split,
            router(folder, tree, [both], "colocated") as colocated,
            Client(split.address) as first,
            Client(colocated.address) as second,
        ):
            yield first, second


def _tree(options: argparse.Namespace) -> dict[str, object]:
    pool = {"kv_memory": options.kv_memory, "chunk_tokens": options.chunk}
    return {
        "model": str(options.model),
        "weights": "random" if options.random_weights else "files",
        "device": options.device,
        "transport": options.transport,
        "max_context": 2 * max(options.lengths),
        "prefill": pool,
        "decode": {**pool, "max_batch": 8},
        "router": {**FREE_ROUTER, "local_prefill": "fallback", "local_prefill_after": 0},
    }


def ask(client: Client, length: int) -> tuple[float, float]:
    """Milliseconds to the first token, and from the first to the second."""
    prompt = random.choices(range(5, WORDS), k=length)
    began = time.perf_counter()
    seen: list[float] = []
    with client.stream(prompt, max_tokens=ANSWER, ignore_eos=True) as stream:
        for delta in stream:
            seen += [time.perf_counter()] * len(delta.token_ids)
    return (seen[0] - began) * 1e3, (seen[1] - seen[0]) * 1e3


def measure(split: Client, colocated: Client, length: int, repeats: int) -> list[float]:
    """Medians of both first tokens, both second tokens, and the pairwise difference of the
    first."""
    rows = []
    for _ in range(repeats + 2):
        ours, theirs = ask(split, length), ask(colocated, length)
        rows.append((ours[0], theirs[0], ours[1], theirs[1], ours[0] - theirs[0]))
    return [statistics.median(column) for column in zip(*rows[2:], strict=True)]


def print_table(split: Client, colocated: Client, options: argparse.Namespace) -> None:
    print(f"{'':<14}{'TTFT, ms':^36}{'first to second token, ms':>30}")
    names = ("split", "colocated", "added", "split", "colocated")
    print(f"{'prompt':<14}" + "".join(f"{name:>12}" for name in names))
    for length in options.lengths:
        first, first_there, second, second_there, added = measure(
            split, colocated, length, options.repeats
        )
        cells = (first, first_there, added, second, second_there)
        print(f"{length:<14,}" + "".join(f"{cell:>12.2f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--chunk", type=int, default=0, help="prompt tokens per step")
    parser.add_argument("--kv-memory", default="8GiB")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        clusters(options, Path(folder)) as (split, colocated),
    ):
        print_table(split, colocated, options)


if __name__ == "__main__":
    main()

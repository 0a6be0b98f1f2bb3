"""The cost of the router's cache index: `python -m bench.index`.

Reports a million cached pages on 16 workers to a router, through the messages that
workers send, and prints the memory that these take, the time to hash and look up a
prompt of 8,192 tokens, and the time of events, a reset and a full garbage collection.
Then, how long the policy takes to choose among 1 + 1 to 64 + 64 workers.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from baton.core.page_keys import KEY_BYTES, page_keys
from baton.router.placement.placement import (
    DecodeColumns,
    LocalPrefill,
    PrefillColumns,
    Snapshot,
    columns_of,
)
from baton.router.placement.policy import choose
from baton.router.placement.worker_state import CacheIndex
from baton.v1 import worker_pb2 as pb

PAGES = 1_000_000
WORKERS = 16
PAGE_SIZE = 16
PROMPT_TOKENS = 8192
EVENT_PAGES = 32
REPEATS = 200
POOL_WORKERS = (1, 2, 4, 8, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=PAGES, help="pages of all workers together")
    parser.add_argument("--workers", type=int, default=WORKERS)
    arguments = parser.parse_args()
    prompt = [random.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    chain = page_keys(b"root", prompt, PAGE_SIZE)
    _report("hash the prompt", lambda: page_keys(b"root", prompt, PAGE_SIZE))
    before = _resident_bytes()
    workers = [_worker(arguments.pages // arguments.workers) for _ in range(arguments.workers)]
    used = (_resident_bytes() - before) / sum(map(len, workers))
    print(f"{sum(map(len, workers)):,} pages on {len(workers)} workers: {used:.0f} bytes a page")
    _bench_lookups(workers, chain)
    _bench_events(workers[0])
    _report("a full garbage collection", gc.collect, repeats=3)
    _bench_choice()


def _worker(pages: int) -> CacheIndex:
    held = CacheIndex()
    held.apply(_events(1, pages, reset=True))
    return held


def _events(number: int, pages: int, *, reset: bool = False) -> pb.CacheEvents:
    """Events parsed from bytes, as a router gets them."""
    keys = random.randbytes(pages * KEY_BYTES)
    stored = [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
    message = pb.CacheEvents(number=number, reset=reset, stored=stored)
    return pb.CacheEvents.FromString(message.SerializeToString())


def _bench_lookups(workers: Sequence[CacheIndex], chain: list[bytes]) -> None:
    def look_up() -> None:
        for worker in workers:
            worker.leading(chain)

    _report("look the prompt up: held by none", look_up)
    for index, worker in enumerate(workers):
        share = len(chain) * (index + 1) // len(workers) - 1
        worker.apply(pb.CacheEvents(number=2, stored=chain[:share]))
    _report("look the prompt up: a part held by each", look_up)
    for worker in workers:
        worker.apply(pb.CacheEvents(number=3, stored=chain))
    _report("look the prompt up: held by all", look_up)


def _bench_events(worker: CacheIndex) -> None:
    batches = iter([_events(number, EVENT_PAGES) for number in range(4, 5 + REPEATS)])
    _report(f"apply {EVENT_PAGES} new pages", lambda: worker.apply(next(batches)))
    whole = _events(1, len(worker), reset=True)
    _report(f"apply a reset of {len(worker):,} pages", lambda: worker.apply(whole), repeats=3)


def _bench_choice() -> None:
    for count in POOL_WORKERS:
        snapshot = _cluster(count)
        _report(f"choose among {count} + {count} workers", partial(choose, snapshot))


def _cluster(count: int) -> Snapshot:
    draw = random.Random(1)
    names = [f"decode-{index}" for index in range(count)]
    prefill = [
        (draw.randrange(5000), True, 16 * draw.randrange(PROMPT_TOKENS // 16), 0)
        for _ in range(count)
    ]
    decode = [
        (draw.randrange(30), 1000, True, 16 * draw.randrange(PROMPT_TOKENS // 16), *[0] * 6)
        for _ in range(count)
    ]
    reaches = [frozenset(names)] * count
    return Snapshot(
        PrefillColumns([f"prefill-{i}" for i in range(count)], reaches, *columns_of(prefill)),
        DecodeColumns(names, *columns_of(decode)),
        local=LocalPrefill.AUTO,
        prompt_tokens=PROMPT_TOKENS,
        tokens_wanted=100,
        page_bytes=2 << 20,
    )


def _report(what: str, work: Callable[[], object], repeats: int = REPEATS) -> None:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    print(f"{what}: median {statistics.median(times):.3f} ms, longest {max(times):.3f} ms")


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()

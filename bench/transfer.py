"""The cost of moving pages: `python -m bench.transfer`.

Writes a pool of 64 MiB from this process into another one over NIXL, on CPU
memory, and compares the rate with a copy within one process. Also prints the cost of
a descriptor, the latency of a note, how long a write blocks other Python threads, and
the CPU time of the transfer thread while it waits.

With --cuda: between two processes on a GPU; see bench/transfer_cuda.py. With
--split: between pools that split their heads; see bench/transfer_split.py.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy

from baton.core.types import AttemptKey
from baton.kv_transfer.nixl_transport import NixlTransport
from baton.kv_transfer.transfer_events import ExpectPages
from baton.kv_transfer.transfer_thread import SHORTEST_PAUSE_SECONDS, TransferThread
from baton.kv_transfer.transport import Noted, PageWrite, PoolMemory, WriteDone
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout
from bench import transfer_cuda, transfer_split
from bench.timing import median_seconds

POOL_BYTES = 64 << 20
PAGE_SIZES = (16 << 10, 64 << 10, 1 << 20)
REPEATS = 7
NOTES = 50
LAYOUT = PoolLayout(version=1, model="bench")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true", help="on a GPU's memory")
    parser.add_argument("--split", action="store_true", help="pools that split their heads")
    transfer_cuda.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.cuda:
        transfer_cuda.main(arguments)
    elif arguments.split:
        transfer_split.main()
    else:
        _bench_cpu()


def _bench_cpu() -> None:
    print(f"{POOL_BYTES >> 20} MiB between two processes, CPU memory, medians of {REPEATS}")
    print(f"memcpy within one process: {_gigabytes_per_second(_memcpy_seconds()):.1f} GB/s")
    for page_bytes in PAGE_SIZES:
        _bench_page_size(page_bytes)
    _bench_thread()


def _bench_page_size(page_bytes: int) -> None:
    with _pair(page_bytes) as (source, peer):
        ordered = list(range(POOL_BYTES // page_bytes))
        scattered = random.Random(0).sample(ordered, len(ordered))
        source.write(peer, ordered, ordered)  # the first touch of the peer's memory
        contiguous_seconds = median_seconds(lambda: source.write(peer, ordered, ordered), REPEATS)
        scattered_seconds = median_seconds(lambda: source.write(peer, scattered, ordered), REPEATS)
        descriptor_seconds = (scattered_seconds - contiguous_seconds) / len(ordered)
        print(
            f"NIXL, pages of {page_bytes >> 10:4} KiB: "
            f"contiguous {_gigabytes_per_second(contiguous_seconds):.1f} GB/s, "
            f"scattered {_gigabytes_per_second(scattered_seconds):.1f} GB/s, "
            f"{descriptor_seconds * 1e6:.1f} us a descriptor"
        )
        if page_bytes == PAGE_SIZES[-1]:
            print(f"note, until its answer is heard: {_note_seconds(source, peer) * 1e3:.2f} ms")
            stall = _longest_stall(lambda: source.write(peer, ordered, ordered))
            print(f"longest stall of another Python thread during a write: {stall * 1e3:.1f} ms")


def _bench_thread() -> None:
    pool = _Pool(1 << 20)
    thread = TransferThread(NixlTransport(), pool.memory, LAYOUT, lambda event: None)
    thread.start()
    print(f"transfer thread, idle: {_cpu_share():.2%} of a core")
    thread.post(ExpectPages(AttemptKey("bench", 1), "nobody", [0], 60.0))
    print(f"transfer thread, one reservation open: {_cpu_share():.2%} of a core")
    thread.stop()


class _Pool:
    def __init__(self, page_bytes: int) -> None:
        # numpy requests huge pages; without them NIXL reaches two thirds of its rate.
        self.buffer = numpy.ones(POOL_BYTES, dtype=numpy.uint8)
        self.base = self.buffer.ctypes.data
        self.memory = PoolMemory(self.base, page_bytes, POOL_BYTES // page_bytes, "cpu")


class _Source:
    """A pool and a transport that waits for its own writes and notes."""

    def __init__(self, page_bytes: int) -> None:
        self.pool = _Pool(page_bytes)
        self.transport = NixlTransport()
        self.address = self.transport.register(self.pool.memory, LAYOUT)

    def write(self, peer: str, local: list[int], remote: list[int]) -> None:
        number = self.transport.write(PageWrite(peer, local, remote))
        while WriteDone(number) not in self.transport.poll():
            pass

    def ping(self, peer: str) -> None:
        self.transport.write(PageWrite(peer, (), (), b"ping"))
        while not any(isinstance(event, Noted) for event in self.transport.poll()):
            pass


@contextmanager
def _pair(page_bytes: int) -> Iterator[tuple[_Source, str]]:
    """A source in this process, connected to a pool in another."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_echo, args=(there, page_bytes), daemon=True)
    process.start()
    source = _Source(page_bytes)
    here.send_bytes(source.address.SerializeToString())
    yield source, source.transport.connect(PoolAddress.FromString(here.recv_bytes()))
    here.send_bytes(b"stop")
    process.join()
    source.transport.close()


def _echo(pipe: Connection, page_bytes: int) -> None:
    """The other process: serves a pool and returns every note. Polls as often as a worker."""
    source = _Source(page_bytes)
    peer = source.transport.connect(PoolAddress.FromString(pipe.recv_bytes()))
    pipe.send_bytes(source.address.SerializeToString())
    while not pipe.poll(SHORTEST_PAUSE_SECONDS):
        for event in source.transport.poll():
            if isinstance(event, Noted):
                source.transport.write(PageWrite(peer, (), (), event.note))
    source.transport.close()


def _memcpy_seconds() -> float:
    source, target = _Pool(POOL_BYTES), _Pool(POOL_BYTES)
    return median_seconds(lambda: ctypes.memmove(target.base, source.base, POOL_BYTES), REPEATS)


def _note_seconds(source: _Source, peer: str) -> float:
    def ping_all() -> None:
        for _ in range(NOTES):
            source.ping(peer)

    return median_seconds(ping_all, REPEATS) / NOTES


def _longest_stall(action: Callable[[], None]) -> float:
    """The longest gap in a thread that only reads the clock, while `action` runs."""
    done = threading.Event()
    longest = 0.0

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return longest


def _cpu_share(seconds: float = 2.0) -> float:
    began = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - began) / seconds


def _gigabytes_per_second(seconds: float) -> float:
    return POOL_BYTES / seconds / 1e9


if __name__ == "__main__":
    main()

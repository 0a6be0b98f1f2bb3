"""The cost of moving pages between pools that split their heads: `bench.transfer --split`.

Pages have the shape of Llama 8B's: 8 heads of 128 numbers of 2 bytes, 16 tokens, 32 layers.
One process writes its common part of 64 pages to another over NIXL, on CPU memory. For
comparison: the cost of gathering such parts by a copy first.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy

from baton.kv_transfer.nixl_transport import NixlTransport
from baton.kv_transfer.pool_layout import cpu_digest
from baton.kv_transfer.transport import PagePart, PageWrite, PoolMemory, WriteDone
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout
from bench.timing import median_seconds

PAGES = 64
ROWS = 32 * 2 * 16
HEAD_BYTES = 128 * 2
REPEATS = 5
POLL_SECONDS = 0.0002
LAYOUT = PoolLayout(version=1, model="bench")

CASES = {
    "1 to 1, whole pages": (8, 8, None),
    "2 to 2, whole pages": (4, 4, None),
    "1 to 2, half a page": (8, 4, PagePart(ROWS, 4 * HEAD_BYTES, 4 * HEAD_BYTES, 0)),
    "2 to 1, half a page": (4, 8, PagePart(ROWS, 4 * HEAD_BYTES, 0, 4 * HEAD_BYTES)),
    "1 to 4, a quarter": (8, 2, PagePart(ROWS, 2 * HEAD_BYTES, 2 * HEAD_BYTES, 0)),
}
"""Heads at the sender and at the receiver, and the part that is copied."""


def main() -> None:
    print(f"{PAGES} pages between two processes, CPU memory, medians of {REPEATS}")
    for name, (ours, theirs, part) in CASES.items():
        _bench(name, ours, theirs, part)
    _bench_gather()


def _bench(name: str, ours: int, theirs: int, part: PagePart | None) -> None:
    with _other_process(theirs) as address:
        pool = _Pool(ours)
        transport = NixlTransport()
        transport.register(pool.memory, LAYOUT)
        peer = transport.connect(address, part)
        pages = list(range(PAGES))
        spread = [page * 5 % PAGES for page in pages]  # no two are neighbours at both ends

        def write() -> None:
            number = transport.write(PageWrite(peer, pages, spread))
            while WriteDone(number) not in transport.poll():
                pass

        write()  # the first touch of the peer's memory
        digest = cpu_digest(pool.memory)
        size = PAGES * (part.rows * part.row_bytes if part else pool.memory.page_bytes)
        written = median_seconds(write, REPEATS)
        digested = median_seconds(lambda: digest(pages, part), REPEATS)
        print(
            f"{name}: {size / written / 1e9:.2f} GB/s, {written / PAGES * 1e3:.2f} ms a page; "
            f"digests {size / digested / 1e9:.1f} GB/s"
        )
        transport.close()


def _bench_gather() -> None:
    pool = _Pool(8)
    rows = pool.buffer.reshape(PAGES, ROWS, 8 * HEAD_BYTES)
    staging = numpy.ones((PAGES, ROWS, 4 * HEAD_BYTES), dtype=numpy.uint8)

    def gather() -> None:
        for page in range(PAGES):
            staging[page] = rows[page, :, 4 * HEAD_BYTES :]

    rate = staging.nbytes / median_seconds(gather, REPEATS)
    print(f"gathering half a page by a copy: {rate / 1e9:.2f} GB/s")


class _Pool:
    def __init__(self, heads: int) -> None:
        page_bytes = ROWS * heads * HEAD_BYTES
        self.buffer = numpy.ones(PAGES * page_bytes, dtype=numpy.uint8)
        self.memory = PoolMemory(self.buffer.ctypes.data, page_bytes, PAGES, "cpu")


@contextmanager
def _other_process(heads: int) -> Iterator[PoolAddress]:
    """Serves a pool in another process, which polls as often as a worker."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, heads), daemon=True)
    process.start()
    yield PoolAddress.FromString(here.recv_bytes())
    here.send_bytes(b"stop")
    process.join()


def _serve(pipe: Connection, heads: int) -> None:
    pool, transport = _Pool(heads), NixlTransport()
    pipe.send_bytes(transport.register(pool.memory, LAYOUT).SerializeToString())
    while not pipe.poll(POLL_SECONDS):
        transport.poll()
    transport.close()

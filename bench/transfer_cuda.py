"""The cost of moving pages between two processes on a GPU: `python -m bench.transfer --cuda`.

A push is 8,192 tokens of a model with Llama-3.1-8B's shape: 1 GiB, as 512 pages
of 2 MiB in a random order at both ends. For comparison: a plain copy of as many
bytes within one process, the lower bound of any push; and the digests of as many
pages, which `page_digests: on` adds at each end.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from baton.cli.transfer_probe import MakeTransport, Measured, measure
from baton.core.errors import BatonError
from baton.kv_transfer.nixl_transport import DEVICE_THREADS, NixlTransport
from baton.kv_transfer.pool_layout import gpu_digest
from baton.kv_transfer.routed_transport import RoutedTransport, choose_transport
from baton.kv_transfer.transport import PoolMemory

PAGE_BYTES = 2 << 20
PAGES = 512
PUSHES = 30
NIXL_THREADS = (0, 2, 4, 8)
TARGETS = {"cuda_ipc": 1.2e-3, "nixl": 3e-3}


def main(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{PAGES} pages of {PAGE_BYTES >> 20} MiB, scattered at both ends, {PUSHES} pushes")
    print(f"{'':24}{'best':>10}{'median':>10}{'rate':>14}")
    _print_row("plain copy", _plain_copy_seconds())
    _print_row("digests of the pages", _digest_seconds())
    torch.cuda.empty_cache()
    _bench("cuda_ipc", "CUDA IPC", partial(choose_transport, "cuda_ipc", "cuda"))
    if importlib.util.find_spec("nixl") is None:
        print("NIXL is not installed")
        return
    for threads in arguments.nixl_threads:
        usual = ", as served" if threads == DEVICE_THREADS["cuda"] else ""
        _bench("nixl", f"NIXL, {threads} threads{usual}", partial(_nixl, threads))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nixl-threads",
        type=int,
        nargs="*",
        default=NIXL_THREADS,
        metavar="N",
        help="with --cuda: how many threads share NIXL's descriptors, one row each",
    )


def _bench(transport: str, title: str, make_transport: MakeTransport) -> None:
    """Prints a row, or an error: a transport that fails must not hide the others."""
    try:
        measured = measure(
            make_transport, "cuda", page_bytes=PAGE_BYTES, pages=PAGES, pushes=PUSHES
        )
    except BatonError as error:
        print(f"{title:24}failed: {error.message}")
        return
    _print_row(title, measured.noted)
    _print_row("  until the sender knows", measured.written)
    print(f"  {_verdict(measured, TARGETS[transport])}")


def _verdict(measured: Measured, target: float) -> str:
    median = statistics.median(measured.noted)
    word = "met" if median <= target else "missed"
    return f"target {target * 1e3:.1f} ms: {word}, {median / target:.2f} of it"


def _print_row(title: str, seconds: Sequence[float]) -> None:
    best, median = min(seconds), statistics.median(seconds)
    rate = PAGE_BYTES * PAGES / median / 1e9
    print(f"{title:24}{best * 1e3:7.3f} ms{median * 1e3:7.3f} ms{rate:9.0f} GB/s", flush=True)


def _plain_copy_seconds() -> list[float]:
    source = torch.ones(PAGE_BYTES * PAGES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return [_copy_seconds(source, target) for _ in range(3 + PUSHES)][3:]


def _digest_seconds() -> list[float]:
    pool = torch.ones(PAGE_BYTES * PAGES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    digest = gpu_digest(PoolMemory(pool.data_ptr(), PAGE_BYTES, PAGES, "cuda"))
    pages = random.sample(range(PAGES), PAGES)
    seconds = []
    for _ in range(PUSHES):
        began = time.perf_counter()
        digest(pages)
        seconds.append(time.perf_counter() - began)
    return seconds


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    began, ended = (_new_event() for _ in range(2))
    began.record()
    target.copy_(source)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _nixl(threads: int) -> RoutedTransport:
    return RoutedTransport({"nixl": NixlTransport(threads=threads)})

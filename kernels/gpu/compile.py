"""Compiles kernels on several threads before anything is launched.

Most of a compilation runs without the GIL. Kernels that were compiled before are loaded from
Triton's file cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton
from triton.runtime.jit import JITFunction

THREADS = min(16, len(os.sched_getaffinity(0)))


@contextmanager
def compiling() -> Iterator[None]:
    """Compiles the kernels that this thread would launch within the context, and launches none.

    All are compiled when the context ends. Results are uninitialized: only kernels may index with
    them. Other threads launch as always.
    """
    launch, parse, here = JITFunction.__getitem__, JITFunction.parse, threading.get_ident()
    parsing = threading.Lock()

    def compile_or_launch(kernel: Any, grid: object) -> Callable[..., Any]:
        if threading.get_ident() == here:
            return partial(kernel.warmup, grid=grid)
        started: Callable[..., Any] = launch(kernel, grid)
        return started

    def parse_alone(kernel: Any) -> Any:
        # Two threads that parse at once fail up to Python 3.11.7 (gh-106905).
        with parsing:
            return parse(kernel)

    JITFunction.parse = parse_alone
    try:
        with ThreadPoolExecutor(THREADS) as threads, triton.AsyncCompileMode(threads):
            JITFunction.__getitem__ = compile_or_launch
            try:
                yield
            finally:
                JITFunction.__getitem__ = launch
    finally:
        JITFunction.parse = parse

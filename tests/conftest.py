"""Shared by the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib
from typing import Any

import pytest

DISTRIBUTES = "-n" in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ
"""Whether others run the tests. They start after this process has imported what is below."""

# A suite started in the background inherits an ignored SIGINT, and passes it on to its processes.
# Several tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not DISTRIBUTES:
    gc.disable()  # until all is imported: `pytest_collection_finish`
    # Threads that wait for one another would spin, on cores that two processes share. OpenMP reads
    # it when torch loads it; the processes that tests start decide for themselves.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import torch

    del os.environ["OMP_WAIT_POLICY"]
    # One core for each of the processes that share the suite. Threads that wait for each other
    # stall when one of them does.
    torch.set_num_threads(1)
    # Triton decides when a kernel is defined whether it compiles it or interprets it, so this must
    # come before any test imports kernels, or Triton.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from interpreted_kernels import speed_up

        speed_up()
    from shared_certificates import share_certificates

    share_certificates()

FOLDERS = ("simulation", "cluster", "contract", "unit", "gpu", "page", "clients")
"""Long tests first: two processes share the suite, and neither should wait for the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from shares import ONCE

    items.sort(key=lambda item: (FOLDERS.index(item.path.parent.name), item.path.stem not in ONCE))


def pytest_collection_finish() -> None:
    """Collections of garbage pass over what was imported, millions of objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries that count their objects at the end find none left."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers in every run, whichever tests ran before it."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With xdist: which process runs which test."""
    from shares import Shares

    return Shares(config, log)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the Triton kernels run: a GPU, or this process with the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

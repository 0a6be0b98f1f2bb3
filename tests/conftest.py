"""What the whole suite relies on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

# A suite that a shell started in the background inherits an ignored Ctrl-C, and so would the
# processes it starts. Several tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton decides when a kernel is defined whether it compiles it or interprets it, so this must
# stand before any test imports kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


FOLDERS = ("simulation", "cluster", "contract", "unit", "gpu", "page", "clients")
"""Long tests first: two processes share the suite, and neither should wait for the other."""

RAY = ("test_ray", "test_serve")
"""Who looks for a Ray on this machine must find only its own."""


@pytest.hookimpl(tryfirst=True)  # before groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FOLDERS.index(item.path.parent.name))
    for item in items:
        if item.path.parent.name == "cluster":
            item.add_marker(pytest.mark.xdist_group(_group(item.path)))


def _group(path: Path) -> str:
    """Tests of a file share the clusters that it starts."""
    return "ray" if path.stem in RAY else path.stem


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the Triton kernels run: a GPU, or this process with the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""What the whole suite relies on."""

from __future__ import annotations

import os
import signal

import pytest
import torch

# A suite that a shell started in the background inherits an ignored Ctrl-C, and so would the
# processes it starts. Several tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton decides when a kernel is defined whether it compiles it or interprets it, so this must
# stand before any test imports kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the Triton kernels run: a GPU, or this process with the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

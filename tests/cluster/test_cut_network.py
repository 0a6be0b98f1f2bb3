"""Runs cut_network.py on a network of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from network import ENTER, why_not

INSIDE = Path(__file__).with_name("cut_network.py")


@pytest.mark.faults
def test_a_network_that_is_cut_between_prefill_and_decode_loses_nothing() -> None:
    if reason := why_not():
        pytest.skip(f"needs user namespaces: {reason}")
    command = [*ENTER, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(INSIDE)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr

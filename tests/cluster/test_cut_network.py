"""Runs cut_network.py on a network of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import run_inside

INSIDE = Path(__file__).with_name("cut_network.py")


@pytest.mark.faults
def test_a_network_that_is_cut_between_prefill_and_decode_loses_nothing() -> None:
    run_inside(INSIDE)

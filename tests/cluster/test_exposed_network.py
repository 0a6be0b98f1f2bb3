"""Runs exposed_network.py on a network of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import run_inside

INSIDE = Path(__file__).with_name("exposed_network.py")


@pytest.mark.faults
def test_a_stranger_is_kept_from_pages_by_tls_and_the_network() -> None:
    run_inside(INSIDE)

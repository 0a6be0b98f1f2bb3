"""Runs exposed_network.py and exposed_ray.py, each on a network of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import run_inside

HERE = Path(__file__).parent


@pytest.mark.faults
def test_a_stranger_is_kept_from_pages_by_tls_and_the_network() -> None:
    run_inside(HERE / "exposed_network.py")


@pytest.mark.faults
def test_a_stranger_is_kept_from_ray_by_its_token_and_from_the_controller_by_tls() -> None:
    run_inside(HERE / "exposed_ray.py")

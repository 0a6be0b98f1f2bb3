"""The local-prefill controller against always and never, in virtual time."""

from __future__ import annotations

import dataclasses
import math
from functools import cache, partial

import pytest

from baton.router.placement.placement import LocalPrefill
from tests.support.shared_cores import (
    GPUS,
    SHARED_CORES,
    Cluster,
    Hardware,
    Outcome,
    calibrate,
    outcome,
)

APART = dataclasses.replace(SHARED_CORES, cores=math.inf)
SEEDS = 4
TOLERANCE = 0.05
"""Of the requests: what so few can tell."""


@cache
def run(hardware: Hardware, mode: LocalPrefill, shape: tuple[int, int], load: float) -> Outcome:
    found = calibrate(hardware, *shape)
    return outcome(partial(Cluster, hardware, mode), found, load, shape, SEEDS)


@pytest.mark.parametrize(
    ("hardware", "shape", "load"),
    [
        pytest.param(SHARED_CORES, (32, 16), 0.9, id="short prompts on shared cores"),
        pytest.param(SHARED_CORES, (128, 16), 0.9, id="longer ones"),
        pytest.param(SHARED_CORES, (128, 16), 0.5, id="at half the load"),
        pytest.param(APART, (128, 16), 0.9, id="on a core for each worker"),
        pytest.param(GPUS, (4096, 32), 0.9, id="long prompts on GPUs"),
    ],
)
def test_the_controller_is_never_worse_than_always_or_never(
    hardware: Hardware, shape: tuple[int, int], load: float
) -> None:
    auto, never, always = (
        run(hardware, mode, shape, load)
        for mode in (LocalPrefill.AUTO, LocalPrefill.NEVER, LocalPrefill.ALWAYS)
    )
    assert auto.good >= max(never.good, always.good) - TOLERANCE
    assert auto.seconds <= min(never.seconds, always.seconds) * (1 + 2 * TOLERANCE)


def test_on_devices_of_their_own_prefill_workers_read_most_long_prompts_under_load() -> None:
    assert run(GPUS, LocalPrefill.AUTO, (4096, 32), 0.9).local < 0.5

"""The local-prefill controller against always and never, in virtual time."""

from __future__ import annotations

import random
import statistics
from typing import NamedTuple

import pytest

from baton.router.placement.placement import LocalPrefill
from tests.support.shared_cores import (
    Calibration,
    Cluster,
    Hardware,
    calibrate,
    poisson,
)

# A small model on two cores that four workers share, and on a core for each of them.
SHARED = Hardware(forward=0.045, row=0.0065, message=0.003, push=0.01, cores=2.0)
APART = Hardware(forward=0.045, row=0.0065, message=0.003, push=0.01)
# A large one on GPUs.
GPUS = Hardware(
    forward=4e-3,
    row=2e-5,
    message=5e-4,
    push=3e-3,
    prefill_chunk=8192,
    decode_chunk=2048,
    page_bytes=2 * 2**20,
)
SEEDS = range(4)
REQUESTS = 40
EARLIER = 60
"""Requests that the router learns from before, at 60% of the load."""
TOLERANCE = 0.05
"""Of the requests: what so few can tell."""


class Outcome(NamedTuple):
    good: float  # of all requests
    seconds: float  # from arrival to the last token, on average
    local: float  # of all prompts


def outcome(
    hardware: Hardware, mode: LocalPrefill, found: Calibration, load: float, shape: tuple[int, int]
) -> Outcome:
    rate = load * found.requests_per_second
    requests = []
    for seed in SEEDS:
        cluster = Cluster(hardware, mode)
        draw = random.Random(seed)
        cluster.run(poisson(draw, 0.6 * rate, EARLIER), *shape)
        requests += cluster.run(poisson(draw, rate, REQUESTS), *shape)
    return Outcome(
        statistics.mean(map(found.objective.is_met, requests)),
        statistics.mean(request.times[-1] - request.arrived for request in requests),
        statistics.mean(not request.placement.prefill for request in requests if request.placement),
    )


@pytest.mark.parametrize(
    ("hardware", "shape", "load"),
    [
        pytest.param(SHARED, (32, 16), 0.9, id="short prompts on shared cores"),
        pytest.param(SHARED, (128, 16), 0.9, id="longer ones"),
        pytest.param(SHARED, (128, 16), 0.5, id="at half the load"),
        pytest.param(APART, (128, 16), 0.9, id="on a core for each worker"),
        pytest.param(GPUS, (4096, 32), 0.9, id="long prompts on GPUs"),
    ],
)
def test_the_controller_is_never_worse_than_always_or_never(
    hardware: Hardware, shape: tuple[int, int], load: float
) -> None:
    found = calibrate(hardware, *shape)
    auto, never, always = (
        outcome(hardware, mode, found, load, shape)
        for mode in (LocalPrefill.AUTO, LocalPrefill.NEVER, LocalPrefill.ALWAYS)
    )
    assert auto.good >= max(never.good, always.good) - TOLERANCE
    assert auto.seconds <= min(never.seconds, always.seconds) * (1 + 2 * TOLERANCE)


def test_on_devices_of_their_own_prefill_workers_read_most_long_prompts_under_load() -> None:
    shape = 4096, 32
    assert outcome(GPUS, LocalPrefill.AUTO, calibrate(GPUS, *shape), 0.9, shape).local < 0.5

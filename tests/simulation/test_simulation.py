"""Many seeds, each a short and unlucky life of a small cluster."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .cluster import Cluster

SEEDS = range(240)
MORE_SEEDS = [range(first, first + 7_940) for first in range(240, 32_000, 7_940)]
"""Each takes a minute or two on two cores, and several where others use them."""
PROCESSES = 2
ROOT = Path(__file__).parents[2]


def test_no_seed_breaks_an_invariant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "baton.kv_transfer")
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += Cluster(seed).run()
    check(counts, SEEDS)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", MORE_SEEDS, ids=str)
def test_no_further_seed_breaks_an_invariant(seeds: range) -> None:
    share = len(seeds) // PROCESSES
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.run", "--seeds", f"{first}:{first + share}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for first in seeds[::share]
    ]
    outputs = [run.communicate()[0] for run in runs]
    print(*outputs, sep="\n")
    assert [run.returncode for run in runs] == [0] * PROCESSES
    counts: Counter[str] = Counter()
    for count, what in re.findall(r"^ +(\d+) (.+)$", "\n".join(outputs), re.MULTILINE):
        counts[what] += int(count)
    check(counts, seeds)


def check(counts: Counter[str], seeds: range) -> None:
    assert counts["finished"] > len(seeds), "most requests end well in spite of it all"
    for what in (
        "retries",
        "writes into quarantine",
        "damaged pages",
        "turns over the quarantine budget",
        "pages found",
        "pages fetched",
        "fetched into quarantine",
        "evictions",
        "pages restored",
        "guesses accepted",
        "guesses rejected",
    ):
        assert counts[what] > 0, f"the seeds never saw: {what}"

"""Many seeds, each a short and unlucky life of a small cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

SEEDS = 20_000
PROCESSES = 2
ROOT = Path(__file__).parents[2]


def test_no_seed_breaks_an_invariant() -> None:
    share = SEEDS // PROCESSES
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.run", "--seeds", f"{first}:{first + share}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for first in range(0, SEEDS, share)
    ]
    outputs = [run.communicate()[0] for run in runs]
    print(*outputs, sep="\n")
    assert [run.returncode for run in runs] == [0] * PROCESSES
    counts: Counter[str] = Counter()
    for count, what in re.findall(r"^ +(\d+) (.+)$", "\n".join(outputs), re.MULTILINE):
        counts[what] += int(count)
    assert counts["finished"] > SEEDS, "most requests end well in spite of it all"
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
    ):
        assert counts[what] > 0, f"the seeds never saw: {what}"

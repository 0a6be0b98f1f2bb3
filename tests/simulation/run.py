"""Runs seeds: `python -m tests.simulation.run --seeds 0:20000`, or one: `--seed 42`."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections import Counter

from .cluster import Cluster


def main() -> int:
    logging.getLogger("baton.kv_transfer").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed and print what happened")
    parser.add_argument("--seeds", default="0:1000", help="run the seeds from FIRST:END")
    parser.add_argument("--split", action="store_true", help="workers of several processes")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed, split=arguments.split)
    gc.freeze()  # what was imported, or each full collection passes over it
    first, end = map(int, arguments.seeds.split(":"))
    return run_all(range(first, end), split=arguments.split)


def run_all(seeds: range, *, split: bool) -> int:
    """Prints the counts of all seeds; at the first that fails, its trace."""
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += Cluster(seed, split=split).run()
        except Exception:  # noqa: BLE001 - whatever goes wrong is a finding, to be shown
            failed = seed
            break
    else:
        failed = None
    if failed is not None:
        return replay(failed, split=split)
    seconds = time.perf_counter() - began
    print(f"{len(seeds)} seeds in {seconds:.1f} s ({len(seeds) / seconds:.0f} a second)")
    for name, count in sorted(counts.items()):
        print(f"  {count:9} {name}")
    return 0


def replay(seed: int, *, split: bool) -> int:
    """Runs one seed again, with its trace."""
    cluster = Cluster(seed, split=split, trace=True)
    failure = ""
    try:
        cluster.run()
    except Exception:  # noqa: BLE001 - as above
        failure = traceback.format_exc()
    print("\n".join(cluster.world.trace or []))
    print(failure or f"seed {seed}: nothing is wrong")
    if failure:
        option = " --split" if split else ""
        print(f"seed {seed} failed; again: python -m tests.simulation.run --seed {seed}{option}")
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())

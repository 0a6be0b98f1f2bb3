"""Decode steps with and without recording, in turn, in one engine on a CPU.

    python -m bench.recorded_steps [--model FOLDER] [--threads 2] [--rows 1 4 8]

Both medians are of the same sequences: some steps recorded, then some not.
"""

from __future__ import annotations

import argparse
import statistics
import time

from baton.core import model_store
from baton.engine.runner import Runner
from bench.engine import Ours, random_prompts

STEPS, TURNS = 8, 6
"""Steps of one kind in a row, and how many times both kinds take a turn."""


def medians(ours: Ours, rows: int) -> tuple[float, float]:
    """Median seconds of a step, not recorded and recorded."""
    runner = ours.engine._runner
    assert isinstance(runner, Runner)
    answer = 2 * STEPS * TURNS + 10
    sequences = [ours.sequence(prompt, answer) for prompt in random_prompts(rows, 128)]
    times: dict[bool, list[float]] = {False: [], True: []}
    while any(each.generated < 4 for each in sequences):
        ours.step(sequences, answer)
    for turn in range(2 * TURNS):
        runner.recorded.enabled = turn % 2 == 1
        for _ in range(STEPS):
            start = time.perf_counter()
            ours.step(sequences, answer)
            times[runner.recorded.enabled].append(time.perf_counter() - start)
    for sequence in sequences:
        sequence.lease.release()
    return statistics.median(times[False]), statistics.median(times[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    folder = model_store.locate(options.model)
    print(f"{'':<28}{'called':>12}{'recorded':>12}{'times as fast':>16}")
    for kind in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}):
        ours = Ours(folder, options.threads, 512, **kind)
        for rows in options.rows:
            called, recorded = medians(ours, rows)
            title = f"{next(iter(kind.values()))}, {rows} at once"
            ratio = called / recorded
            print(f"{title:<28}{called * 1e3:>9.1f} ms{recorded * 1e3:>9.1f} ms{ratio:>16.2f}")


if __name__ == "__main__":
    main()

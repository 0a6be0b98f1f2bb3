"""The cost of drawing tokens on a GPU, and how many draws change when logits drift.

    python -m bench.sampling [--vocabulary 128256]

The first table has microseconds per call under a CUDA graph, by batch size and filter; `best` is
the argmax alone. The second table adds noise of a given size to all logits of random rows and
counts the draws that change: with noise per token (kernels/noise.py), and with one random number
per row that is looked up in the cumulative probabilities, as most samplers do. It runs on a CPU
too.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.noise import add_noise, draw_key

FILTERS = {
    "none": (0, 1.0, 0.0),
    "top_k 50": (50, 1.0, 0.0),
    "top_p 0.9": (0, 0.9, 0.0),
    "both": (50, 0.9, 0.0),
    "min_p 0.05": (0, 1.0, 0.05),
}
BATCHES = (1, 8, 32, 64, 256)
DRIFTS = (1e-6, 1e-4, 1e-2)
SPREAD = 3.0


def microseconds(call: Callable[[], object], repeats: int = 50) -> float:
    """The shortest of five rounds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / repeats * 1e6)
    return min(times[1:])


def print_costs(vocabulary: int) -> None:
    from baton.kernels.gpu.sampling import argmax, sample

    print(f"{'batch':<8}" + "".join(f"{name:>12}" for name in ("best", *FILTERS)) + "   us a call")
    for batch in BATCHES:
        torch.manual_seed(batch)
        logits = (torch.randn(batch, vocabulary, device="cuda") * SPREAD).bfloat16()
        cells = [microseconds(functools.partial(argmax, logits))]
        for top_k, top_p, min_p in FILTERS.values():
            columns = (
                torch.ones(batch, device="cuda"),
                torch.full((batch,), top_k, device="cuda", dtype=torch.int32),
                torch.full((batch,), top_p, device="cuda", dtype=torch.float64),
                torch.full((batch,), min_p, device="cuda"),
                keys(batch, "cuda"),
            )
            cells.append(microseconds(functools.partial(sample, logits, *columns)))
        print(f"{batch:<8}" + "".join(f"{cell:>12.1f}" for cell in cells), flush=True)


def keys(rows: int, device: str) -> Tensor:
    return torch.tensor([draw_key(seed, 5) for seed in range(rows)], device=device)


def print_drift(vocabulary: int, device: str, rows: int) -> None:
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randn(rows, vocabulary, device=device, generator=generator) * SPREAD
    chances = torch.rand(rows, 1, device=device, dtype=torch.float64, generator=generator)

    def walk(scores: Tensor) -> Tensor:
        reached = scores.double().softmax(dim=-1).cumsum(dim=-1)
        return torch.searchsorted(reached, chances * reached[:, -1:])

    def draw(scores: Tensor) -> Tensor:
        return add_noise(scores.clone(), keys(rows, device)).argmax(dim=-1)

    print(f"\n{'drift of logits':<18}{'noise per token':>18}{'one walk':>12}   draws changed")
    for drift in DRIFTS:
        moved = logits + drift * torch.randn(
            logits.shape, device=device, generator=generator, dtype=logits.dtype
        )
        shares = [float((way(logits) != way(moved)).float().mean()) for way in (draw, walk)]
        print(f"{drift:<18g}{shares[0]:>18.2%}{shares[1]:>12.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rows", type=int, default=1000, help="rows of the second table")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        print_costs(options.vocabulary)
    print_drift(options.vocabulary, device, options.rows)


if __name__ == "__main__":
    main()

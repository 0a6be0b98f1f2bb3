"""Which kernels a GPU runner compiles, without a GPU: `python compiled_kernels.py FOLDER`.

Prints a JSON object: the kernels compiled by `compiling`, and those that steps of all layers
would still compile. Stands in for the driver, the compiler and the matrix library, so nothing is
launched and nothing is multiplied.
Triton must not interpret.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import triton.compiler
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from baton.engine.architecture import read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.batch import Ints
from baton.engine.gpu.device import AdapterRoom
from baton.engine.gpu.runner import GpuRunner
from baton.engine.gpu.start import _rehearse, _rehearse_steps
from baton.engine.page_groups import make_pool
from baton.engine.step import Plan
from baton.engine.weights import load_model
from baton.kernels.gpu.compile import compiling

CONTEXT, PAGES, PAGE_SIZE = 1024, 256, 16


class Hopper:
    """A driver of no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def multiply(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.mm, but for the numbers: a CPU takes long for those."""
    return x.new_empty(len(x), weight.shape[1]) if out is None else out


def first_slots(plan: Plan) -> Ints:
    """As AdapterSlots.slots_of, where all have the same adapter."""
    return np.zeros(sum(plan.values()), np.int32)


def main(folder: Path) -> None:
    driver.set_active(Hopper())
    triton.compiler.compile = lambda source, **options: object()
    torch.mm = multiply
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda *, fn, key, **_: compiled.append(
        f"{fn.name} {key}"
    )
    shape = read_architecture(folder)
    model = load_model(Checkpoint(folder), shape, torch.bfloat16, "cpu")
    size = shape.pages_shape(PAGES, PAGE_SIZE)
    kv = torch.zeros(size, dtype=torch.bfloat16)
    adapters = AdapterSlots(model, AdapterRoom(4, 16, 0))
    runner = GpuRunner(model, kv, CONTEXT, 64, adapters=adapters, guesses=True)
    runner._recordable = True
    pool = make_pool(PAGES, PAGE_SIZE, shape.slices.windows)
    with runner.compiling():
        _rehearse_steps(runner, pool, 700, CONTEXT, shape.routing)
    ahead = list(compiled)
    with compiling():
        runner._run_recordings()
        for slots_of in (adapters.slots_of, first_slots):
            adapters.slots_of = slots_of  # type: ignore[method-assign]
            _rehearse_steps(runner, pool, 700, CONTEXT, shape.routing)
            for part in ((0, 17), (0, 600), (16, 500), (512, 256)):
                for count in (1, 3):
                    _rehearse(runner, pool, [part] * count)
    print(json.dumps({"ahead": sorted(ahead), "later": sorted(compiled[len(ahead) :])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

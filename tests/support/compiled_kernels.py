"""Which kernels a GPU runner compiles, without a GPU: `python compiled_kernels.py FOLDER…`.

Prints a JSON object: for each folder's model the kernels compiled by `compiling` and those that
steps of all layers would still compile; and all kernels that were translated, of these models and
of those in CASES. Stands in for the driver, the compiler and the matrix library, so nothing is
launched and nothing is multiplied. Triton must not interpret.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from no_device import Driver, Translation, hurry, multiply, multiply_batches
from small_shapes import EXPERTS, LATENTS, SHAPE, SINKS
from triton import knobs
from triton.runtime import driver

from baton.engine.architecture import Architecture, parse_architecture, read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.empty_pages import stored_dtype
from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.batch import Ints
from baton.engine.gpu.device import AdapterRoom
from baton.engine.gpu.numerics import Numerics
from baton.engine.gpu.runner import GpuRunner
from baton.engine.gpu.start import _rehearse, _rehearse_steps
from baton.engine.model_choice import KvDtype, WeightQuantization, stored_shape
from baton.engine.page_groups import make_pool
from baton.engine.random_tensors import RandomTensors
from baton.engine.step import Plan
from baton.engine.weights import load_model
from baton.kernels.gpu import (
    hopper_chunks,
    hopper_codes,
    hopper_latents,
    long_attention,
    packed_rows,
    prefetch,
)
from baton.kernels.gpu.chunk_attention import merge_attended
from baton.kernels.gpu.compile import compiling
from baton.kernels.gpu.experts import sum_parts
from baton.kernels.gpu.pages import copy_pages, digest_pages

CONTEXT, PAGES, PAGE_SIZE, CHUNK = 1024, 256, 16, 700
ADDRESS = 1 << 40
SHORT_LATENTS = LATENTS | {"kv_lora_rank": 256}
"""Which Hopper's own kernel does not support."""

CASES: tuple[tuple[dict[str, object], WeightQuantization, KvDtype, Numerics], ...] = (
    (SHAPE, "none", "auto", Numerics.INVARIANT),
    (SHAPE, "fp8", "int8", Numerics.INVARIANT),
    (SHAPE | {"hidden_size": 768}, "int4", "int4", Numerics.INVARIANT),
    (EXPERTS, "none", "auto", Numerics.INVARIANT),
    (SINKS, "none", "auto", Numerics.INVARIANT),
    (SINKS, "none", "fp8", Numerics.INVARIANT),
    (LATENTS, "none", "auto", Numerics.INVARIANT),
    (SHORT_LATENTS, "none", "auto", Numerics.FAST),
    (SHAPE | {"model_type": "olmo2"}, "none", "auto", Numerics.INVARIANT),
)


def first_slots(plan: Plan) -> Ints:
    """As AdapterSlots.slots_of, where all have the same adapter."""
    return np.zeros(sum(plan.values()), np.int32)


def kernels_of(folder: Path, compiled: list[str]) -> dict[str, list[str]]:
    """Those compiled ahead and later, as the hook behind `compiled` notes them."""
    compiled.clear()
    shape = read_architecture(folder)
    model = load_model(Checkpoint(folder), shape, torch.bfloat16, "cpu")
    size = shape.pages_shape(PAGES, PAGE_SIZE)
    kv = torch.zeros(size, dtype=torch.bfloat16)
    adapters = AdapterSlots(model, AdapterRoom(4, 16, 0))
    runner = GpuRunner(model, kv, CONTEXT, 64, adapters=adapters, guesses=True)
    runner._recordable = True
    pool = make_pool(PAGES, PAGE_SIZE, shape.slices.windows)
    with runner.compiling():
        _rehearse_steps(runner, pool, CHUNK, CONTEXT, shape.routing)
    ahead = list(compiled)
    with compiling():
        runner._run_recordings()
        for slots_of in (adapters.slots_of, first_slots):
            adapters.slots_of = slots_of  # type: ignore[method-assign]
            _rehearse_steps(runner, pool, CHUNK, CONTEXT, shape.routing)
            for part in ((0, 17), (0, 600), (16, 500), (512, 256)):
                for count in (1, 3):
                    _rehearse(runner, pool, [part] * count)
    return {"ahead": sorted(ahead), "later": sorted(compiled[len(ahead) :])}


def pretend_to_be_hopper() -> None:
    """Chooses what only a Hopper has, for tensors of no device."""
    for module in (hopper_chunks, hopper_latents):
        module.copies_pages = lambda kv_layer: kv_layer.dtype in long_attention.ELEMENTS
    hopper_chunks._chip_programs = lambda device: 132
    hopper_codes._hopper = packed_rows._hopper = lambda device: True
    prefetch.can_prefetch = lambda device: True
    long_attention.supports = lambda head_dim, dtype, device: head_dim in hopper_chunks.ROOMS


def architecture(settings: dict[str, object]) -> Architecture:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(settings))
        return parse_architecture(config)


def rehearse(
    settings: dict[str, object],
    quantization: WeightQuantization,
    kv_dtype: KvDtype,
    numerics: Numerics,
) -> None:
    """Compiles what a runner would before it serves. Chunks are long at once."""
    shape = architecture(settings)
    weights = RandomTensors("cpu")
    model = load_model(
        weights, shape, torch.bfloat16, "cpu", quantization=quantization, packed=True
    )
    size = stored_shape(shape.pages_shape(PAGES, PAGE_SIZE), kv_dtype, "cuda")
    kv = torch.zeros(size, dtype=stored_dtype(kv_dtype, torch.bfloat16))
    runner = GpuRunner(model, kv, CONTEXT, 64, numerics=numerics, chunk_tokens=64)
    runner._recordable = True
    pool = make_pool(PAGES, PAGE_SIZE, shape.slices.windows)
    with runner.compiling():
        _rehearse_steps(runner, pool, CHUNK, CONTEXT, shape.routing)


def compile_others() -> None:
    """Kernels of several ranks, of another numerics' library and of pages."""
    ids = torch.zeros(2, dtype=torch.int32)
    heads = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    weights = torch.zeros(1, 2, 16, 1)
    with compiling():
        sum_parts(heads[0])
        merge_attended(heads, weights, heads, weights)
        for page_bytes in (4096, 4100):
            copy_pages(ADDRESS, ADDRESS, page_bytes, ids, ids)
            digest_pages(ADDRESS, page_bytes, ids, ids)


def main(folders: list[str]) -> None:
    hurry()
    gc.disable()  # garbage is little, and looking for it takes long
    driver.set_active(Driver())
    translation = Translation()
    torch.mm, torch.bmm = multiply, multiply_batches
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda *, fn, key, **_: compiled.append(
        f"{fn.name} {key}"
    )
    found = {folder: kernels_of(Path(folder), compiled) for folder in folders}
    pretend_to_be_hopper()
    for case in CASES:
        rehearse(*case)
    compile_others()
    print(json.dumps({"models": found, "translated": sorted(translation.kernels)}))


if __name__ == "__main__":
    main(sys.argv[1:])

"""One model on one device: its weights, its pages, and one step over many sequences.

Several processes can run one model together, each with a part of it on its own device
(engine/tensor_parallel.py): rank 0's engine is used as any other, and the others follow it.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.core.types import Work
from baton.engine.architecture import Architecture, Split
from baton.engine.checkpoint import Checkpoint, checkpoint_files, digest_files
from baton.engine.gpu.device import GpuSettings, confine, memory_left
from baton.engine.gpu.upload import Upload
from baton.engine.grammar import Grammars, TokenGuide
from baton.engine.model import Model
from baton.engine.model_choice import (
    AnyArchitecture,
    EngineChoice,
    FallbackArchitecture,
    WeightQuantization,
    check_quantization,
    describe_fallback,
    part_of,
    read_model,
)
from baton.engine.page_groups import make_pool
from baton.engine.page_pool import PagePool
from baton.engine.random_tensors import RandomTensors
from baton.engine.runner import Runner
from baton.engine.step import InFlightStep, Outcome, Plan
from baton.engine.tensor_parallel import Group
from baton.engine.weights import load_model

if TYPE_CHECKING:
    from baton.engine.fallback.fallback_model import FallbackModel

log = logging.getLogger(__name__)

LoadProgress = Callable[[str, float], None]
DEFAULT_GPU_SETTINGS = GpuSettings()
WHOLE = Split()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FALLBACK_PAGES_SHARE = 0.8
"""Of the memory beside the weights, through transformers: what a step needs is not known there."""


class AnyRunner(Protocol):
    """Runs plans on one kind of device."""

    def launch(self, plan: Plan) -> InFlightStep: ...

    def follow(self, step: bytes) -> None:
        """Runs this rank's part of a step that rank 0 runs."""


@dataclass(eq=False)
class Engine:
    """Owned by one thread: nothing here may be called from two."""

    architecture: AnyArchitecture  # of the whole model
    split: Split
    pool: PagePool
    kv: Tensor  # [page, layer of a slice, k/v, token, kv_head, dim], one allocation; own heads
    context_length: int
    fingerprint: str
    grammars: Grammars
    make_runner: Callable[[GpuSettings], AnyRunner]
    gpu: GpuSettings  # what the runner was made for

    def __post_init__(self) -> None:
        self._runner = self.make_runner(self.gpu)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        page_size: int = 16,
        kv_memory: int = 1 << 30,
        max_context: int | None = None,
        threads: int | None = None,
        random_weights: bool = False,
        gpu: GpuSettings = DEFAULT_GPU_SETTINGS,
        progress: LoadProgress = lambda what, done: None,
        group: Group | None = None,
        engine: EngineChoice = "auto",
        quantization: WeightQuantization = "none",
    ) -> Engine:
        """Loads the model in `folder`, with `kv_memory` bytes of pages; on a GPU, 0 takes the
        rest of its memory.

        `threads` sets torch's threads in this process. `progress` receives the current task and
        its completed fraction. With a `group` this is one rank's part, `kv_memory` is that of
        all ranks together, and the ranks connect once this one has its weights.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        architecture = read_model(folder, engine, max_context)
        check_quantization(quantization, architecture, device)
        split = group.split if group else WHOLE
        part = part_of(architecture, split)
        kind = _dtype(dtype)
        page_bytes = _page_bytes(part, page_size, kind) * split.size
        least = page_bytes * len(architecture.slices.windows)
        if kv_memory or device == "cpu":
            _check_holds_a_page(kv_memory, least)
        if gpu.share < 1 and device != "cpu":
            confine(gpu.share, device)
        if device != "cpu":
            torch.cuda.synchronize(device)  # makes its context
            progress("device", 1.0)
        model: Model | FallbackModel
        if isinstance(architecture, Architecture):
            source = (
                RandomTensors(device)
                if random_weights
                else _open_weights(folder, architecture, device, partial(progress, "weights"))
            )
            model = load_model(source, architecture, kind, device, group, quantization)
        else:
            model = _load_fallback(folder, architecture, kind, device, random_weights)
        context = min(architecture.context_length, max_context or architecture.context_length)
        if not kv_memory:
            kv_memory = _memory_for_pages(model, gpu, context, page_size, kind, device, group)
            kv_memory *= split.size
            _check_holds_a_page(kv_memory, least)
        pages = kv_memory // page_bytes
        if group:
            group.connect(torch.device(device))
            pages = group.least(pages)
        pool = make_pool(pages, page_size, architecture.slices.windows)
        context = pool.longest_context(context)
        shape = part.pages_shape(pool.total, page_size)
        kv = torch.zeros(shape, dtype=kind, device=device)
        make = partial(_make_runner, model, kv, pool, context, progress, group)
        progress("pages", 1.0)
        name = fingerprint(folder, architecture, random_weights, quantization, split.size)
        grammars = Grammars(folder, architecture.vocabulary_size)
        return cls(architecture, split, pool, kv, context, name, grammars, make, gpu)

    def reconfigure(self, threads: int, gpu: GpuSettings | None = None) -> None:
        """Hands the engine to the calling thread, for another role's steps. No step may be in
        flight; weights and pages stay.

        On a GPU, other settings record all steps anew: recorded steps keep the share of the GPU
        that `confine` gave them.
        """
        torch.set_num_threads(threads)
        if self.kv.device.type == "cpu" or gpu is None or gpu == self.gpu:
            return
        assert self.split.size == 1, "ranks have the same settings for both roles"
        self.gpu = gpu
        if gpu.share < 1:
            confine(gpu.share, str(self.kv.device))
        del self._runner
        gc.collect()  # it is part of cycles; frees its memory first
        torch.cuda.empty_cache()
        self._runner = self.make_runner(gpu)

    def guide(self, work: Work) -> TokenGuide | None:
        """Keeps an answer to its request's grammar; None without one."""
        return self.grammars.guide(work)

    def launch(self, plan: Plan) -> InFlightStep:
        """Starts one forward for all chunks and advances each sequence's `computed`.

        On a GPU the next step can be planned and launched meanwhile.
        """
        return self._runner.launch(plan)

    def step(self, plan: Plan) -> list[Outcome]:
        """Runs all chunks in one forward and waits for the outcomes."""
        return self.launch(plan).wait()

    def follow(self, step: bytes) -> None:
        """On a rank other than 0: runs its part of a step that rank 0 broadcast."""
        self._runner.follow(step)


def _open_weights(
    folder: Path, architecture: Architecture, device: str, progress: Callable[[float], None]
) -> Checkpoint:
    upload = None if device == "cpu" else Upload(torch.device(device))
    return Checkpoint(folder, progress, upload, architecture.quantization)


def _load_fallback(
    folder: Path,
    architecture: FallbackArchitecture,
    dtype: torch.dtype,
    device: str,
    random_weights: bool,
) -> FallbackModel:
    """Loads and checks the model, and says what it costs."""
    from baton.engine.fallback.fallback_model import load_fallback  # imports transformers
    from baton.engine.fallback.fallback_runner import check_model

    if random_weights:
        raise InvalidConfig("random weights are for native models", field="weights")
    log.warning("%s", describe_fallback(architecture.family))
    model = load_fallback(folder, architecture, dtype, device)
    check_model(model, dtype, device)
    return model


def _memory_for_pages(
    model: Model | FallbackModel,
    gpu: GpuSettings,
    context: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    group: Group | None,
) -> int:
    if isinstance(model, Model):
        from baton.engine.gpu.start import memory_for_pages  # imports triton

        shape = model.architecture
        return memory_for_pages(gpu, shape, context, page_size, dtype, device, group)
    return int(memory_left(gpu, device, 0, "the weights") * FALLBACK_PAGES_SHARE)


def _make_runner(
    model: Model | FallbackModel,
    kv: Tensor,
    pool: PagePool,
    context: int,
    progress: LoadProgress,
    group: Group | None,
    gpu: GpuSettings,
) -> AnyRunner:
    if not isinstance(model, Model):
        from baton.engine.fallback.fallback_runner import FallbackRunner  # imports transformers

        return FallbackRunner(model, kv)
    if kv.device.type == "cpu":
        return Runner(model, kv, group)
    from baton.engine.gpu.start import start_runner  # imports triton

    return start_runner(model, kv, pool, context, gpu, progress, group)


def fingerprint(
    folder: Path,
    architecture: AnyArchitecture,
    random_weights: bool = False,
    quantization: WeightQuantization = "none",
    ranks: int = 1,
) -> str:
    """Equal for the same model on any machine; different for any other, but for collisions."""
    shape = dataclasses.asdict(architecture)
    if quantization != "none":  # a rank quantizes its part of weights and rows
        shape["quantized"] = [quantization, ranks]
    files = b"random" if random_weights else digest_files(checkpoint_files(folder))
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode() + files).hexdigest()


def _page_bytes(architecture: AnyArchitecture, page_size: int, dtype: torch.dtype) -> int:
    if page_size < 1:
        raise InvalidConfig(f"a page holds at least 1 token, not {page_size}", field="page_size")
    return math.prod(architecture.pages_shape(1, page_size)) * dtype.itemsize


def _check_holds_a_page(kv_memory: int, page_bytes: int) -> None:
    if kv_memory < page_bytes:
        raise InvalidConfig(
            f"{kv_memory} bytes hold no page: one takes {page_bytes}", field="kv_memory"
        )


def _dtype(name: str | torch.dtype) -> torch.dtype:
    known = DTYPES.get(name) if isinstance(name, str) else name
    if known is None or known not in DTYPES.values():
        raise InvalidConfig(
            f"dtype {name} is not supported; supported: {', '.join(DTYPES)}", field="dtype"
        )
    return known

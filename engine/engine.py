"""One model on one device: its weights, its pages, and one step over many sequences.

Several processes can run one model together, each with a part of it on its own device
(engine/tensor_parallel.py): rank 0's engine is used like any other, and the others follow it.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.core.types import Adapter, Work
from baton.engine.adapter_pool import AdapterPool
from baton.engine.architecture import Architecture, Split
from baton.engine.checkpoint import Checkpoint, checkpoint_files, digest_files
from baton.engine.empty_pages import check_memory_left, empty_pages
from baton.engine.encoder import Encoder
from baton.engine.gpu.device import GpuSettings, check_codes, confine, memory_left
from baton.engine.gpu.upload import Upload
from baton.engine.grammar import Grammars, TokenGuide
from baton.engine.model import Model
from baton.engine.model_choice import (
    AnyArchitecture,
    EngineChoice,
    FallbackArchitecture,
    KvDtype,
    WeightQuantization,
    accept_kv_dtype,
    check_adapters_of,
    check_quantization,
    describe_fallback,
    part_of,
    read_model,
    served_context,
)
from baton.engine.page_groups import make_pool
from baton.engine.page_pool import PagePool
from baton.engine.random_tensors import RandomTensors
from baton.engine.runner import Runner
from baton.engine.sequence import Sequence
from baton.engine.step import InFlightStep, Outcome, Plan
from baton.engine.stored_shapes import check_stored
from baton.engine.tensor_parallel import Group
from baton.engine.weight_codes import PACKED
from baton.engine.weights import load_model
from baton.kernels.cpu import compiler
from baton.kernels.integers import SCHEMES
from baton.kernels.linear import WeightCodes
from baton.kernels.low_rank import AdapterProducts

if TYPE_CHECKING:
    from baton.engine.fallback.fallback_model import FallbackModel
    from baton.engine.gpu.adapter_slots import AdapterSlots

log = logging.getLogger(__name__)

LoadProgress = Callable[[str, float], None]
DEFAULT_GPU_SETTINGS = GpuSettings()
WHOLE = Split()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FALLBACK_PAGES_SHARE = 0.8
"""The pages' share of the memory that the weights leave, in models that run through transformers:
there the memory of a step is unknown."""


AnyAdapterPool = AdapterPool[AdapterProducts] | AdapterPool[Tensor]


class AnyRunner(Protocol):
    """Runs plans on one kind of device."""

    runs_ahead: bool  # whether a launch returns before the step has ended

    def launch(self, plan: Plan) -> InFlightStep: ...

    def follow(self, step: bytes) -> None:
        """Runs this rank's part of a step that rank 0 runs."""


@dataclass(eq=False)
class Engine:
    """Owned by one thread; not thread-safe."""

    architecture: AnyArchitecture  # of the whole model
    split: Split
    pool: PagePool
    dtype: torch.dtype  # in which the model computes
    kv: Tensor  # [page, layer of a slice, k/v, token, kv_head, dim]; this rank's heads
    context_length: int
    fingerprint: str
    grammars: Grammars
    make_runner: Callable[[GpuSettings], AnyRunner]
    gpu: GpuSettings  # what the runner was made for
    gpu_adapters: AdapterSlots | None = None  # the slots of a GPU that has some
    adapters: AnyAdapterPool | None = None  # once opened
    encoder: Encoder | None = None  # the embedding model, once loaded
    draft: Engine | None = None  # of the draft model, once loaded

    def __post_init__(self) -> None:
        self._runner = self.make_runner(self.gpu)

    @property
    def has_independent_rows(self) -> bool:
        """True if no row of a step depends on the other rows."""
        if self.kv.device.type == "cpu":
            invariant = compiler.suits(self.dtype, self.kv.device)
        else:
            invariant = self.gpu.numerics == "invariant"
        return invariant and isinstance(self.architecture, Architecture)

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
        kv_dtype: KvDtype = "auto",
    ) -> Engine:
        """Loads the model in `folder`, with `kv_memory` bytes of pages; on a GPU, 0 takes the
        rest of its memory.

        `threads` sets torch's threads in this process. `progress` receives the current task and
        its completed fraction. With a `group`, loads one rank's part: `kv_memory` is that of all
        ranks together, and the ranks connect once this one has its weights.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        architecture = read_model(folder, engine, max_context)
        context = served_context(architecture, max_context)
        split = group.split if group else WHOLE
        part = part_of(architecture, split)
        kind = _dtype(dtype)
        check_quantization(quantization, architecture, device, str(kind).removeprefix("torch."))
        accept_kv_dtype(kv_dtype, architecture, device)
        empty = partial(empty_pages, part, page_size, kind, kv_dtype, device)
        page_bytes = empty(1, "meta").nbytes * split.size
        least = page_bytes * len(architecture.slices.windows)
        if kv_memory or device == "cpu":
            _check_holds_a_page(kv_memory, least)
        if gpu.share < 1 and device != "cpu":
            confine(gpu.share, device)
        if device != "cpu":
            torch.cuda.synchronize(device)  # creates the CUDA context
            progress("device", 1.0)
        check_codes(device, quantization, kv_dtype)
        model: Model | FallbackModel
        if isinstance(architecture, Architecture):
            source = (
                RandomTensors(device)
                if random_weights
                else _open_weights(folder, architecture, device, partial(progress, "weights"))
            )
            balanced = kv_dtype != "auto"
            model = load_model(
                source, architecture, kind, device, group, quantization, balanced=balanced
            )
        else:
            log.warning("%s", describe_fallback(folder, engine))
            model = _load_fallback(folder, architecture, kind, device, random_weights)
        adapters = _allocate_adapters(model, gpu, device, group)
        if not kv_memory:
            kv_memory = _memory_for_pages(model, gpu, context, page_size, kind, device, group)
            if gpu.draft:
                kv_memory = gpu.draft.beside(kv_memory, least // split.size)
            kv_memory *= split.size
            _check_holds_a_page(kv_memory, least)
        if device == "cpu":
            check_memory_left(kv_memory // split.size)
        pages = kv_memory // page_bytes
        if group:
            group.connect(torch.device(device))
            pages = group.least(pages)
        pool = make_pool(pages, page_size, architecture.slices.windows)
        context = pool.longest_context(context)
        kv = empty(pool.total, device)
        make = partial(_make_runner, model, kv, pool, context, progress, group, adapters)
        progress("pages", 1.0)
        codes = quantization if device == "cpu" else PACKED.get(quantization, quantization)
        name = fingerprint(folder, architecture, random_weights, codes, split.size)
        grammars = Grammars(folder, architecture.vocabulary_size)
        return cls(
            architecture, split, pool, kind, kv, context, name, grammars, make, gpu, adapters
        )

    def open_adapters(
        self,
        slots: int,
        allowed: Iterable[str],
        wake: Callable[[], object],
        fetch: Callable[[Adapter], object] | None = None,
    ) -> AnyAdapterPool:
        """Opens the pool of adapters; see AdapterPool. Raises InvalidConfig if the model supports
        none. On a GPU, the engine's settings must have room for `slots` adapters."""
        check_adapters_of(self.architecture)
        if self.gpu_adapters:
            self.adapters = AdapterPool(self.gpu_adapters, slots, allowed, wake, fetch)
        else:
            assert isinstance(self._runner, Runner)
            self.adapters = AdapterPool(self._runner, slots, allowed, wake, fetch)
        return self.adapters

    def load_encoder(self, folder: Path) -> None:
        self.encoder = Encoder(folder, self.kv.device)

    def encode(self, inputs: Collection[Sequence]) -> list[bool]:
        """Computes inputs of the embedding model in one batch. Returns whether each is finite."""
        assert self.encoder is not None
        pooled = [each.pooled for each in inputs if each.pooled]
        vectors = self.encoder.embed([each.tokens for each in inputs])
        for rows, vector in zip(pooled, vectors, strict=True):
            rows.add(vector.double(), 1)
        return [bool(vector.isfinite().all()) for vector in vectors]

    def reconfigure(self, threads: int, gpu: GpuSettings | None = None) -> None:
        """Hands the engine to the calling thread, for another role's steps. No step may be in
        flight; weights and pages stay.

        On a GPU, changed settings record all steps again, since recorded steps keep the share of
        the GPU that `confine` set.
        """
        torch.set_num_threads(threads)
        if self.kv.device.type == "cpu" or gpu is None or gpu == self.gpu:
            return
        assert self.split.size == 1, "ranks have the same settings for both roles"
        self.gpu = gpu
        if gpu.share < 1:
            confine(gpu.share, str(self.kv.device))
        del self._runner
        gc.collect()  # the runner is part of cycles; free its memory first
        torch.cuda.empty_cache()
        self._runner = self.make_runner(gpu)

    @property
    def runs_ahead(self) -> bool:
        """True if a step may be planned while the one before runs."""
        return self._runner.runs_ahead

    def guide(self, work: Work) -> TokenGuide | None:
        """Returns the guide that keeps an answer to its grammar; None without a grammar."""
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
        """Runs this rank's part of a step that rank 0 broadcast. On ranks other than 0."""
        self._runner.follow(step)


def _open_weights(
    folder: Path, architecture: Architecture, device: str, progress: Callable[[float], None]
) -> Checkpoint:
    check_stored(folder, architecture)
    upload = None if device == "cpu" else Upload(torch.device(device))
    return Checkpoint(folder, progress, upload, architecture.quantization)


def _load_fallback(
    folder: Path,
    architecture: FallbackArchitecture,
    dtype: torch.dtype,
    device: str,
    random_weights: bool,
) -> FallbackModel:
    from baton.engine.fallback.fallback_model import load_fallback  # imports transformers

    if random_weights:
        raise InvalidConfig("random weights are for native models", field="weights")
    return load_fallback(folder, architecture, dtype, device)


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

        return memory_for_pages(gpu, model, context, page_size, dtype, device, group)
    return int(memory_left(gpu, device, 0, "the weights") * FALLBACK_PAGES_SHARE)


def _make_runner(
    model: Model | FallbackModel,
    kv: Tensor,
    pool: PagePool,
    context: int,
    progress: LoadProgress,
    group: Group | None,
    adapters: AdapterSlots | None,
    gpu: GpuSettings,
) -> AnyRunner:
    if not isinstance(model, Model):
        from baton.engine.fallback.fallback_model import FallbackRunner  # imports transformers

        return FallbackRunner(model, kv)
    if kv.device.type == "cpu":
        return Runner(model, kv, group)
    from baton.engine.gpu.start import start_runner  # imports triton

    return start_runner(model, kv, pool, context, gpu, progress, group, adapters)


def _allocate_adapters(
    model: Model | FallbackModel, gpu: GpuSettings, device: str, group: Group | None
) -> AdapterSlots | None:
    """Called before the pages are allocated, which get the rest of the memory."""
    if not gpu.adapters or device == "cpu" or not isinstance(model, Model):
        return None
    from baton.engine.gpu.adapter_slots import AdapterSlots  # imports triton

    return AdapterSlots(model, gpu.adapters, group)


def fingerprint(
    folder: Path,
    architecture: AnyArchitecture,
    random_weights: bool = False,
    quantization: WeightCodes | Literal["none"] = "none",
    ranks: int = 1,
) -> str:
    """A digest: equal for the same model on any machine, different for any other model."""
    shape = dataclasses.asdict(architecture)
    if quantization != "none":  # a rank quantizes its part of weights and rows
        # Files may hold pages of an earlier version's codes.
        scheme = SCHEMES[8] if quantization == "int8" else ()
        shape["quantized"] = [quantization, ranks, *scheme]
    files = b"random" if random_weights else digest_files(checkpoint_files(folder))
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode() + files).hexdigest()


def _check_holds_a_page(kv_memory: int, page_bytes: int) -> None:
    if kv_memory < page_bytes:
        message = f"{kv_memory} bytes hold no page: one takes {page_bytes}"
        raise InvalidConfig(message, field="kv_memory")


def _dtype(name: str | torch.dtype) -> torch.dtype:
    known = DTYPES.get(name) if isinstance(name, str) else name
    if known is None or known not in DTYPES.values():
        raise InvalidConfig(
            f"dtype {name} is not supported; supported: {', '.join(DTYPES)}", field="dtype"
        )
    return known

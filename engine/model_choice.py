"""Chooses the engine of a model: the native one, or transformers' classes (engine/fallback).

Does not import torch unless the fallback is chosen.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.core.page_reach import LayerSlices, cut_layers
from baton.engine.architecture import Architecture, Split, check_split, read_architecture
from baton.engine.families import FAMILIES
from baton.engine.model_config import read_stated
from baton.kernels import GPU_SCALE_BYTES, SCALE_BYTES
from baton.kernels.head_sizes import gpu_stored_bytes, stored_bytes

log = logging.getLogger(__name__)

EngineChoice = Literal["auto", "native", "transformers"]
WeightQuantization = Literal["none", "int8", "int4", "fp8"]
"""The quantization of a model's weights when they are loaded."""

KvDtype = Literal["auto", "int8", "int4", "fp8"]
"""The dtype of keys and values in pages; auto: the model's."""

GPU_INT4_HEAD = 128
"""Larger heads in int4 are not yet verified to have the same bits in every kernel."""


@dataclass(frozen=True, slots=True)
class FallbackArchitecture:
    """The shape of a model that transformers runs."""

    family: str
    class_name: str
    version: str  # of transformers, whose code decides what a page holds
    body: str  # the submodule in front of the head
    layers: int
    kv_heads: int
    head_dim: int  # of keys; values may be shorter
    vocabulary_size: int
    context_length: int
    windows: tuple[int | None, ...]  # a token sees itself and window - 1 tokens before it

    @property
    def slices(self) -> LayerSlices:
        return cut_layers(self.windows)

    def pages_shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        """[page, layer of a slice, k/v, token, kv_head, dim]"""
        return (pages, self.slices.layers, 2, page_size, self.kv_heads, self.head_dim)


AnyArchitecture = Architecture | FallbackArchitecture


def uses_fallback(folder: Path, engine: EngineChoice = "auto") -> bool:
    """True if transformers runs the model. Native families run natively, unless `engine` says
    otherwise or only transformers supports a setting of the model."""
    if engine != "auto":
        return engine == "transformers"
    if model_type(folder) not in FAMILIES:
        return True
    return native_obstacle(folder) is not None and _inspected(folder) is not None


def native_obstacle(folder: Path) -> str | None:
    """Returns why the native engine does not run a model of a native family, else None."""
    if model_type(folder) not in FAMILIES:
        return None
    try:
        read_architecture(folder)
    except UnsupportedModel as error:
        return str(error)
    return None


def choose_dtype(configured: str, device: str, *, fallback: bool = False) -> str:
    """The configured dtype, or for "auto" the fastest one on `device`. The fallback engine
    computes in float32 on CPUs: in torch's bfloat16 a row's bits depend on its batch."""
    if configured != "auto":
        return configured
    if device != "cpu":
        return "bfloat16"
    from baton.kernels.cpu import compiler  # imports torch

    return "bfloat16" if compiler.multiplies_bfloat16() and not fallback else "float32"


def describe_cpu(dtype: str) -> str:
    """Describes in one line a CPU's dtype and kernels."""
    from baton.kernels.cpu import compiler  # imports torch

    return f"{dtype}, {compiler.describe()}"


def model_type(folder: Path) -> str:
    return read_stated(folder / "config.json").get("model_type", str, "")


def read_model(
    folder: Path, engine: EngineChoice = "auto", max_context: int | None = None
) -> AnyArchitecture:
    """The architecture of the model in `folder`, for the engine that runs it. Raises
    UnsupportedModel."""
    if engine == "transformers" or (engine == "auto" and model_type(folder) not in FAMILIES):
        return _inspect(folder)
    try:
        return read_architecture(folder, max_context)
    except UnsupportedModel:
        if engine == "auto" and (found := _inspected(folder)):
            return found
        raise


def _inspected(folder: Path) -> FallbackArchitecture | None:
    """The model as transformers runs it; None if it cannot."""
    try:
        return _inspect(folder)
    except UnsupportedModel:
        return None


def _inspect(folder: Path) -> FallbackArchitecture:
    from baton.engine.fallback.inspection import inspect_model  # imports torch and transformers

    return inspect_model(folder)


def served_context(model: AnyArchitecture, max_context: int | None) -> int:
    """The longest context that is served. Raises InvalidConfig if the model's is shorter."""
    if max_context is not None and max_context > model.context_length:
        raise InvalidConfig(
            f"max_context is {max_context}, and the model ({model.family}) has a context of"
            f" {model.context_length}",
            field="max_context",
        )
    return max_context or model.context_length


def check_ranks_of(model: AnyArchitecture, size: int) -> None:
    """Raises InvalidConfig if `size` ranks cannot share the model."""
    if isinstance(model, Architecture):
        check_split(model, size)
    elif size > 1:
        raise InvalidConfig(
            f"{size} ranks cannot share a model that runs through transformers",
            field="tensor_parallel",
        )


def check_quantization(
    quantization: WeightQuantization, model: AnyArchitecture, device: str, dtype: str
) -> None:
    """Raises InvalidConfig if the model cannot be quantized on `device` with `dtype`. Either may
    be `auto`."""
    if quantization != "none" and (obstacle := _obstacle(quantization, model, device, dtype)):
        raise InvalidConfig(f"{obstacle}; quantization is {quantization}", field="quantization")


def _obstacle(
    quantization: WeightQuantization, model: AnyArchitecture, device: str, dtype: str
) -> str | None:
    if not isinstance(model, Architecture):
        return "a model that runs through transformers cannot be quantized"
    fp8 = quantization == "fp8"
    if not fp8 and not device.startswith("cuda"):
        return None
    if device == "cpu":
        return "CPUs have int8 and int4, not fp8"
    if fp8 and dtype not in ("auto", "bfloat16"):
        return f"fp8 needs dtype bfloat16, not {dtype}"
    if dtype == "float32":
        return f"{quantization} on a GPU needs dtype bfloat16 or float16, not float32"
    return "experts are not quantized on GPUs yet" if model.routing else None


def check_adapters_of(model: AnyArchitecture) -> None:
    """Raises InvalidConfig if the model's adapters cannot be served."""
    if not isinstance(model, Architecture):
        raise InvalidConfig(
            "a model that runs through transformers has no adapters yet", field="adapters"
        )


def check_kv_dtype(kv_dtype: KvDtype, model: AnyArchitecture, device: str) -> None:
    """Raises InvalidConfig if the model's pages cannot have this dtype on `device`, which may be
    `auto`."""
    if kv_dtype == "auto":
        return
    if not isinstance(model, Architecture):
        obstacle = "a model that runs through transformers has pages of its own dtype"
    elif kv_dtype == "fp8" and device == "cpu":
        obstacle = "CPUs have int8 or int4 pages, not fp8"
    elif model.latent:
        obstacle = "pages of latents are not quantized yet"
    elif model.head_dim % SCALE_BYTES:
        obstacle = f"heads of {model.head_dim} numbers, no multiple of 4, are not quantized"
    elif kv_dtype == "int4" and model.head_dim % 8:  # codes would not fill whole vectors
        obstacle = f"heads of {model.head_dim} numbers, no multiple of 8, are not kept in int4"
    elif kv_dtype == "int4" and model.head_dim > GPU_INT4_HEAD and device.startswith("cuda"):
        obstacle = f"GPUs have no int4 pages of heads above {GPU_INT4_HEAD} numbers yet"
    else:
        return
    raise InvalidConfig(f"{obstacle}; kv_dtype is {kv_dtype}", field="kv_dtype")


def accept_kv_dtype(kv_dtype: KvDtype, model: AnyArchitecture, device: str) -> None:
    """Like check_kv_dtype, but also logs a warning about int4."""
    check_kv_dtype(kv_dtype, model, device)
    if note := describe_pages(kv_dtype):
        log.warning("%s", note)


def describe_pages(kv_dtype: KvDtype) -> str:
    """A warning for int4 pages, in one line; empty for others."""
    if kv_dtype != "int4":
        return ""
    return "int4 pages change answers: `baton doctor --quality` shows how much (docs/MODELS.md)"


def stored_shape(shape: tuple[int, ...], kv_dtype: KvDtype, device: str) -> tuple[int, ...]:
    """The shape in which numbers [..., dim] are stored: a head's scales follow its codes."""
    if kv_dtype == "auto":
        return shape
    on_gpu, dim = device.startswith("cuda"), shape[-1]
    if kv_dtype == "int4":
        return (*shape[:-1], gpu_stored_bytes(dim) if on_gpu else stored_bytes(dim))
    return (*shape[:-1], dim + (GPU_SCALE_BYTES if on_gpu else SCALE_BYTES))


def part_of(model: AnyArchitecture, split: Split) -> AnyArchitecture:
    """The architecture of one rank's part. Raises InvalidConfig if the model cannot be split."""
    check_ranks_of(model, split.size)
    return split.of(model) if isinstance(model, Architecture) else model


def describe_fallback(folder: Path, engine: EngineChoice) -> str:
    """A warning in one line that a model runs through transformers, with the reason if its family
    is native."""
    obstacle = native_obstacle(folder) if engine == "auto" else None
    reason = f" ({obstacle})" if obstacle else ""
    return (
        f"{model_type(folder)} runs through transformers{reason}, over our pages: without compiled"
        " kernels or recorded steps, without tensor parallelism, and with last bits that depend on"
        " the batch, whatever numerics says"
    )

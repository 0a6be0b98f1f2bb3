"""A worker's settings for its GPU, and its confinement to a part of it.

A green context owns some of the GPU's multiprocessors; what is launched in it runs there.
Processes that share a GPU run at the same time only under NVIDIA's multi-process service
(worker/resources.py). Its own way to divide a GPU, a percentage of threads per process, is
not used: with cuBLAS 13.0 most percentages leave parts of matrix products unwritten.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidConfig

GRANULARITY = 8
"""Multiprocessors are assigned in groups of this size."""

CODES_CAPABILITY = (9, 0)

log = logging.getLogger(__name__)

_contexts: list[object] = []
"""References that keep contexts alive."""


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The LoRA adapters that a GPU has room for."""

    slots: int
    rank: int  # the largest
    host_memory: int  # bytes of adapters that wait in host memory to be copied again


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """The memory that the main model leaves for a draft model on a GPU."""

    fixed: int  # bytes of its weights and its steps, and of its pages if these are configured
    page: int  # bytes for each page of the main model; 0: its pages are configured

    def beside(self, left: int, page: int) -> int:
        """The share of `left` bytes for the main model's pages of `page` bytes."""
        return (left - self.fixed) * page // (page + self.page)


@dataclass(frozen=True, slots=True)
class GpuSettings:
    memory_share: float = 0.9  # of the GPU's memory, for weights, pages and work
    max_batch: int = 256  # requests of a decode step
    chunk_tokens: int = 8192  # prompt tokens of a step
    share: float = 1.0  # of the GPU's multiprocessors
    numerics: str = "invariant"  # see engine/gpu/numerics.py
    adapters: AdapterRoom | None = None  # None: no adapters are served
    guesses: bool = False  # whether decode steps may check guesses
    short_chunk: int = 1  # most tokens of a sequence in a step that only decodes
    draft: DraftRoom | None = None  # None: there is no draft model


def memory_left(settings: GpuSettings, device: str, reserved: int, beside: str) -> int:
    """Bytes left of this worker's share of the GPU, without those that it has allocated and
    `reserved` ones. If none are left, raises InvalidConfig, which names what is `beside`."""
    import torch  # as below

    free, total = torch.cuda.mem_get_info(device)
    mine = int(total * settings.memory_share) - torch.cuda.memory_reserved(device)
    left = min(mine, free) - reserved
    if left <= 0:
        raise InvalidConfig(
            f"gpu_memory {settings.memory_share} of {total >> 30} GiB leaves no room for pages"
            f" beside {beside}",
            field="gpu_memory",
        )
    return left


def check_codes(device: str, quantization: str, kv_dtype: str) -> None:
    """Raises InvalidConfig if the GPU has no products of these codes that sum in our order."""
    import torch  # as below

    integers = kv_dtype.startswith("int")  # dequantized before they are multiplied
    chosen = {"quantization": quantization, "kv_dtype": "auto" if integers else kv_dtype}
    needing = [field for field, value in chosen.items() if value not in ("none", "auto")]
    if device == "cpu" or not needing:
        return
    if (capability := torch.cuda.get_device_capability(device)) < CODES_CAPABILITY:
        found, needed = (".".join(map(str, each)) for each in (capability, CODES_CAPABILITY))
        raise InvalidConfig(
            f"{chosen[needing[0]]} needs a GPU of compute capability {needed}, not {found}",
            field=needing[0],
        )


def confine(share: float, device: str) -> None:
    """Confines what this thread launches from now on to `share` of the multiprocessors.

    Called before anything else uses the GPU: streams made earlier are not bound.
    """
    import torch  # GpuSettings are read where torch is not loaded
    from torch.cuda import green_contexts

    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.device(device).index or 0
    total = torch.cuda.get_device_properties(index).multi_processor_count
    count = max(GRANULARITY, int(share * total) // GRANULARITY * GRANULARITY)
    context: Any = green_contexts.GreenContext.create(num_sms=count, device_id=index)
    context.set_context()
    _contexts.append(context)
    log.info("computing on %d of the GPU's %d multiprocessors", count, total)

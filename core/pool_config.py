"""The sections of a configuration about the pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from baton.core.config_values import (
    Bytes,
    Niceness,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Share,
    Size,
    key,
)

_RAY_COUNTS = {"CPU", "GPU", "memory", "object_store_memory"}
_Resources = Annotated[
    Mapping[str, float],
    (
        lambda value: not value.keys() & _RAY_COUNTS and all(n >= 1e-4 for n in value.values()),
        "must have 0.0001 or more of each name, and not CPU, GPU or memory, which Ray counts"
        " itself (GPUs are in `gpus`)",
    ),
]


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What both pools have."""

    workers: PositiveInt = key(1, "Workers.")
    host: str = key("127.0.0.1", "Where workers listen.")
    port: Port = key(0, "0 chooses a free port; processes started one by one need a fixed one.")
    kv_memory: Bytes = key(
        Size(0),
        'K/V memory of each worker, such as "2GiB"; 0 chooses by device: 1 GiB, or on a GPU all'
        " that `gpu_memory` leaves.",
        "--kv-memory",
    )
    threads: PositiveInt | None = key(None, "CPU threads of one worker; unset uses all cores.")
    gpus: float | None = key(
        None, "GPUs of one worker; unset uses one for each of its processes if the cluster has any."
    )
    resources: _Resources = key(
        dict, "Resources of a Ray node that one worker needs, such as {baton_prefill: 1}."
    )
    tensor_parallel: PositiveInt = key(
        1,
        "Processes that share the model in each worker; on GPUs each has its own GPU of one node.",
        "--tensor-parallel",
    )


@dataclass(frozen=True, slots=True)
class PrefillConfig(PoolConfig):
    """The prefill pool."""

    workers: PositiveInt = key(1, "Prefill workers.", "--prefill")
    chunk_tokens: NonNegativeInt = key(
        0,
        "Prompt tokens in one step; 0 chooses by device: 512, or 8,192 on a GPU.",
        "--chunk-tokens",
    )
    background_tokens: NonNegativeInt = key(
        0,
        "The same of background requests, such as those of batches: another prompt may have to wait"
        " for that step; 0 chooses by device: 64, or 2,048 on a GPU.",
    )
    gpu_share: Share = key(
        1.0,
        "Share of a GPU's multiprocessors that one worker uses. Below 1 where both pools share a"
        " GPU: the rest stays free for decode (docs/PERFORMANCE.md).",
        "--gpu-share",
    )


@dataclass(frozen=True, slots=True)
class DecodeConfig(PoolConfig):
    """The decode pool."""

    workers: PositiveInt = key(1, "Decode workers.", "--decode")
    max_batch: NonNegativeInt = key(
        0, "Requests in one step; 0 chooses by device: 64, or 256 on a GPU.", "--max-batch"
    )
    background_batch: NonNegativeInt = key(
        0,
        "The same of background requests, such as those of batches: another request may have to"
        " wait for that step; 0 chooses by device: 16, or 256 on a GPU.",
    )
    chunk_tokens: NonNegativeInt = key(
        0,
        "Prompt tokens in one step (local prefill, and requests that lost their pages); 0 chooses"
        " by device: 256, or 2,048 on a GPU.",
    )
    nice: Niceness = key(
        19,
        "On a CPU: niceness of decode's threads. Where both pools share cores, prefill then runs at"
        " full speed, and decode in larger batches.",
    )
    ticket_seconds: PositiveFloat = key(600.0, "Seconds that reserved pages wait for a prompt.")

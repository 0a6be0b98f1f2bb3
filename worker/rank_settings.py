"""Whether several processes can share a worker's model, and what rank 0 tells the others of it.

Imports no torch: a rank must know its threads first, and a cluster what it cannot start.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from core.config import CacheConfig
from core.errors import BatonError, InvalidConfig, from_reason
from engine.architecture import Architecture
from engine.split import Split, check_split

LOADED = b"loaded"
"""The answer of a rank that can follow steps."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """As Engine.load takes them, but for those that only rank 0 needs."""

    rank: int
    size: int
    # A file that does not exist yet, of a folder that all ranks can write to.
    meeting_point: str
    folder: str
    dtype: str
    device: str
    page_size: int
    kv_memory: int  # of all ranks
    threads: int
    nice: int
    random_weights: bool
    transport: str
    log_level: str

    @property
    def split(self) -> Split:
        return Split(self.rank, self.size)

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> RankSettings:
        return cls(**json.loads(message))


def check_ranks(size: int, model: Architecture, device: str, cache: CacheConfig) -> None:
    """Raises InvalidConfig when `size` processes cannot serve as one worker."""
    if size == 1:
        return
    check_split(model, size)
    if device == "cuda":
        raise InvalidConfig(
            "several processes can share a worker's model on CPUs only, not yet on GPUs",
            field="tensor_parallel",
        )
    if cache.host_memory or cache.files:
        raise InvalidConfig(
            "a worker whose model several processes share has no second tier: set neither"
            " cache.host_memory nor cache.files, or tensor_parallel to 1",
            field="tensor_parallel",
        )


def encode_error(error: BatonError) -> bytes:
    told = {"reason": error.reason, "message": error.message, "field": error.field}
    return json.dumps(told).encode()


def decode_error(answer: bytes) -> BatonError:
    return from_reason(**json.loads(answer))

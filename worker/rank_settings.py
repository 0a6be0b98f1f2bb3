"""Whether several processes can share a worker's model, and what rank 0 tells the others of it.

Imports no torch: a rank must know its threads first, and a cluster what it cannot start.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from baton.core.errors import BatonError, InvalidConfig, from_reason
from baton.engine.architecture import Architecture
from baton.engine.gpu.settings import GpuSettings
from baton.engine.split import Split, check_split

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
    # Whether each rank has a GPU of its own.
    own_devices: bool
    # The inherited memory file of the second tier's rows; none where there is no such tier.
    rows_file: int | None
    page_size: int
    kv_memory: int  # of all ranks
    max_context: int | None
    threads: int
    nice: int
    random_weights: bool
    transport: str
    log_level: str
    gpu: GpuSettings

    @property
    def split(self) -> Split:
        return Split(self.rank, self.size)

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> RankSettings:
        values = json.loads(message)
        return cls(**{**values, "gpu": GpuSettings(**values["gpu"])})


def rank_devices(size: int, device: str, visible: int, *, may_share: bool) -> list[str]:
    """The device of each of `size` ranks, where `visible` GPUs can be seen: one each, in order.

    Raises InvalidConfig where there are too few and they may not be shared.
    """
    if device == "cpu":
        return ["cpu"] * size
    if visible < size and not (visible and may_share):
        raise InvalidConfig(
            f"{size} processes are to share the model, on a GPU each, and this worker sees"
            f" {visible}",
            field="tensor_parallel",
        )
    return [f"cuda:{rank % visible}" for rank in range(size)]


def check_ranks(size: int, model: Architecture, gpu_share: float = 1.0) -> None:
    """Raises InvalidConfig when `size` processes cannot serve as one worker."""
    if size == 1:
        return
    check_split(model, size)
    if gpu_share < 1:
        raise InvalidConfig(
            "a worker whose model several processes share takes its GPUs whole: gpu_share must"
            " be 1, or tensor_parallel",
            field="tensor_parallel",
        )


def encode_error(error: BatonError) -> bytes:
    told = {"reason": error.reason, "message": error.message, "field": error.field}
    return json.dumps(told).encode()


def decode_error(answer: bytes) -> BatonError:
    return from_reason(**json.loads(answer))

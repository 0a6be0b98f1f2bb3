"""A worker's costs and capacity: a small JSON file, measured on a live cluster or hand-written.

    {"prefill": [0.003, 2.05e-05, 9e-10, 2.3e-05], "transfer": [0.001, 2.5e-11], …}

The coefficients are those of router/placement/cost_model.py. `H200_8B` is the default.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic import NonNegativeFloat as Number
from pydantic import NonNegativeInt as Count

from baton.core.errors import InvalidConfig
from baton.core.page_reach import Window, pages_held, windows_of
from baton.router.placement.cost_model import EXPOSED_PRIOR, Costs, PromptCosts

Two: TypeAlias = Annotated[tuple[Number, ...], Field(min_length=2, max_length=2)]
Four: TypeAlias = Annotated[tuple[Number, ...], Field(min_length=4, max_length=4)]

NICE_STEP = 1.25
"""Factor between the weights of two neighbouring nice levels, as in the kernel's table."""


def weight(niceness: int) -> float:
    """Returns a thread's weight; 1 at nice level 0."""
    return NICE_STEP**-niceness


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The cores of one machine that all workers share, each with one thread.

    The kernel divides them by weight, at most a core for each thread. Decode workers have less
    weight (decode.nice): next to as many busy prefill workers as there are cores they almost stop,
    next to one less they run at full speed.
    """

    # 0 if each worker has its own hardware.
    count: int
    decode_weight: float

    def decode_speed(self, prefill: int, decode: int) -> float:
        """Returns a decode worker's speed with these numbers of busy workers, relative to its
        speed alone."""
        if not self.count or prefill + decode <= self.count:
            return 1.0
        wanted = prefill + self.decode_weight * decode
        if wanted <= self.count:
            # Prefill workers have a core each; decode workers share the others.
            return (self.count - prefill) / decode
        return self.decode_weight * self.count / wanted


@dataclass(frozen=True, slots=True)
class Profile:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    # Seconds for a prompt, a token, a (token, attended token) pair, and a queued token.
    prefill: Four
    # Seconds for a push, and a byte.
    transfer: Two
    # Seconds for a step, a request, a page, and a busy prefill worker (0 if the pools share no
    # hardware).
    step: Four
    # Seconds for a push, and for a second of transfer beyond what compute can hide.
    exposed: Two = EXPOSED_PRIOR
    # From a request's arrival to its first token, without waits and compute.
    overhead_seconds: Number = 0.0
    page_size: Count = 16
    # The window of each slice of the layers, 0 without one; empty if there is one slice.
    windows: tuple[Count, ...] = ()
    page_bytes: Count = 2 * 2**20
    # Pages of one worker's pool, and the most requests in a step.
    prefill_pages: Count = 50_000
    decode_pages: Count = 50_000
    max_batch: Count = 256
    # The most tokens in a prefill step.
    chunk_tokens: Count = 8192
    # Cores that all workers share (0: each has its own hardware), and the weight of a decode
    # worker's thread; a prefill worker's is 1.
    shared_cores: Count = 0
    decode_weight: Number = 1.0
    # The share by which each other busy prefill worker prolongs a prefill step.
    crowding: Number = 0.0
    # Seconds of a role switch after the drain, and of a new worker's start.
    switch_seconds: Number = 2.0
    start_seconds: Number = 60.0

    def costs(self, answer_tokens: float) -> Costs:
        once, token, attended, queued = self.prefill
        return Costs(
            # The simulator has no second tier.
            prefill=PromptCosts(once, token, attended, queued, restored=0.0),
            transfer=self.transfer,
            exposed=self.exposed,
            step=self.step,
            interfered=self._interfered,
            answer_tokens=answer_tokens,
        )

    @property
    def slices(self) -> tuple[Window, ...]:
        return windows_of(self.windows)

    def pages_held(self, tokens: float) -> float:
        """Pages of a sequence of `tokens` tokens."""
        return pages_held(tokens, self.page_size, self.slices)

    @property
    def cores(self) -> SharedCores:
        return SharedCores(self.shared_cores, self.decode_weight)

    @property
    def _interfered(self) -> float:
        """Returns the share of a busy prefill worker's time that decode workers lose."""
        once, _, _, busy = self.step
        return busy / (once + busy) if busy else 0.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


H200_8B = Profile(
    prefill=(3e-3, 2.05e-5, 9e-10, 2.3e-5),
    transfer=(1e-3, 2.5e-11),
    step=(4.15e-3, 1.2e-5, 4.5e-7, 0.0),
)
"""An H200 with an 8B-shaped model in bfloat16, fitted to the table in docs/PERFORMANCE.md within
8%. Assumes a network of 40 GB/s between workers."""


def load_profile(path: Path) -> Profile:
    try:
        return TypeAdapter(Profile).validate_json(path.read_bytes())
    except OSError as error:
        why = str(error)
    except ValidationError as error:
        wrong = error.errors()[0]
        why = ": ".join([".".join(map(str, wrong["loc"])), wrong["msg"]]).removeprefix(": ")
    raise InvalidConfig(f"{path} is not a profile: {why}", field="profile")

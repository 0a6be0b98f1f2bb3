"""A phase: prefill or decode, run on top of an engine by a worker's engine thread.

All methods run on the engine thread, one at a time, and none of them blocks.
This package imports neither phase, so `phase_factory` finds their classes by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from baton.core.config import Config
from baton.core.types import Role
from baton.kv_transfer.transfer_events import TransferEvent
from baton.kv_transfer.transfer_thread import TransferThread
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox

if TYPE_CHECKING:
    from baton.engine.engine import Engine


class Phase(Protocol):
    def on_message(self, attachment: int, message: pb.RouterMessage, arrived: float) -> None:
        """Handles a router's message that arrived at `arrived`, by the monotonic clock."""

    def on_detach(self, attachment: int) -> None:
        """Releases everything that a disconnected router's requests hold."""

    def on_transfer(self, event: TransferEvent) -> None:
        """Handles an event of the transfer thread."""

    def step(self) -> bool:
        """Runs one step of the engine. False when there is nothing to run."""

    def load(self) -> pb.Load:
        """How busy the phase and its pool are."""

    def drain(self) -> None:
        """Refuses new requests from now on; routers retry them on another worker."""

    def resume(self) -> None:
        """Accepts new requests again."""

    def hand_back(self) -> None:
        """Fails every request; routers retry them on another worker."""

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""

    @property
    def settled(self) -> bool:
        """Whether there are no requests, no in-flight steps and no transfers of any page."""


PhaseFactory = Callable[["Engine", TransferThread, Outbox, WorkerMetrics, Config], Phase]

_CLASSES = {
    Role.PREFILL: ("baton.prefill_worker.prefill_phase", "PrefillPhase"),
    Role.DECODE: ("baton.decode_worker.decode_phase", "DecodePhase"),
}


def phase_factory(role: Role) -> PhaseFactory:
    module, name = _CLASSES[role]
    return cast(PhaseFactory, getattr(importlib.import_module(module), name))

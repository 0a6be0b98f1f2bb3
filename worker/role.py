"""What a phase is to the worker that runs it.

A role is an object on top of the engine. All of its methods run on the engine
thread, one at a time, and none of them waits.
"""

from __future__ import annotations

from typing import Protocol

from baton.kv_transfer.events import TransferEvent
from baton.v1 import worker_pb2 as pb


class Role(Protocol):
    def on_message(self, attachment: int, message: pb.RouterMessage, arrived: float) -> None:
        """A router asks for something; it has since `arrived`, by the monotonic clock."""

    def on_detach(self, attachment: int) -> None:
        """A router is gone: everything that its requests hold is let go."""

    def on_transfer(self, event: TransferEvent) -> None:
        """The transfer thread reports."""

    def step(self) -> bool:
        """Runs one step of the engine. False when there is nothing to run."""

    def load(self) -> pb.Load:
        """How busy the role is, its pool included."""

    def drain(self) -> None:
        """From now on new requests are refused, in a way that has routers try elsewhere."""

    def resume(self) -> None:
        """Takes new requests again."""

    def hand_back(self) -> None:
        """Gives up every request, in a way that has its router go on elsewhere."""

    @property
    def idle(self) -> bool:
        """Whether no request is here."""

    @property
    def settled(self) -> bool:
        """Whether nothing is left: no request, no step, and no transfer of any page."""

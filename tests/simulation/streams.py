"""The stream between a router and a worker, as gRPC gives it.

Messages come in order and none is lost, until the stream breaks; then each side
hears of it in its own time, and what was on its way is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.v1 import worker_pb2 as pb

from .world import World

if TYPE_CHECKING:
    from .router import SimulatedRouter
    from .worker import SimulatedWorker


class Stream:
    def __init__(
        self, world: World, router: SimulatedRouter, worker: SimulatedWorker, attachment: int
    ) -> None:
        self.router = router
        self.worker = worker
        self.attachment = attachment
        self.open = True
        self._world = world
        self._arrival = {"up": 0.0, "down": 0.0}

    def to_worker(self, message: pb.RouterMessage) -> None:
        self._send("up", lambda: self.worker.on_message(self, message))

    def to_router(self, message: pb.WorkerMessage) -> None:
        self._send("down", lambda: self.router.on_message(self, message))

    def cut(self, reason: str, *, died: bool = True) -> None:
        """Breaks the stream."""
        if self.open:
            self.open = False
            world = self._world
            world.after(world.delay(), lambda: self.router.on_lost(self, reason, died=died))
            world.after(world.delay(), lambda: self.worker.on_detach(self))

    def _send(self, way: str, deliver: Callable[[], None]) -> None:
        world = self._world
        at = max(self._arrival[way], world.now + world.delay())
        self._arrival[way] = at
        world.at(at, lambda: deliver() if self.open else None)

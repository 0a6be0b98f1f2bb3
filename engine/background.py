"""Work beside the engine thread: one task after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

Task = Callable[[], None]


class Background(Protocol):
    def submit(self, task: Task) -> None:
        """Has `task` run, after all that were submitted before."""

    def stop(self, seconds: float) -> None:
        """Lets what was submitted end, for so long at most."""


class BackgroundThread:
    """A thread that does not keep its process alive. What a task raises ends it."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def stop(self, seconds: float) -> None:
        self._tasks.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while task := self._tasks.get():
                task()
        except BaseException as error:  # noqa: BLE001 the thread's edge: its owner must know
            self._on_crash(error)

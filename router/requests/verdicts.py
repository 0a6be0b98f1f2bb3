"""Lost worker processes and the verdicts on them. No I/O.

Another worker, or the worker's next process, reads the step record of the lost one
(worker/step_record.py) and reports a verdict, through the controller or in its Welcome. A process
that answers again was not dead.

Only evidence convicts: a verdict that names only this request, or an engine that hung while the
request ran alone. A loss without a verdict only makes a request a suspect.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from baton.v1.worker_pb2 import Verdict

log = logging.getLogger(__name__)


class Finding(enum.Enum):
    """What a loss says about one request that ran there."""

    INNOCENT = enum.auto()
    # It shared the step that crashed; or it was there when something other than a step crashed,
    # such as a transport whose peer died; or there is no verdict.
    SUSPECT = enum.auto()
    CULPRIT = enum.auto()  # it was alone in the step that crashed


@dataclass(eq=False, slots=True, weakref_slot=True)
class Loss:
    """The loss of a worker's process, shared by all requests that ran there."""

    process: int  # its incarnation
    verdict: Verdict | None = None
    hung: bool = False  # the engine hung, so the process's later end acquits no request

    @property
    def is_open(self) -> bool:
        """True while a verdict may still come."""
        return not self.hung and self.verdict is None

    def finding(self, request_id: str, *, alone: bool = False) -> Finding:
        """Judges a request that ran there; `alone` says that it ran alone. Its epoch does not
        matter: the worker may still have run an earlier attempt."""
        if self.hung and alone:
            return Finding.CULPRIT
        if self.verdict is None:
            return Finding.SUSPECT
        suspects = self.verdict.suspects
        if self.verdict.crashed and not suspects:
            return Finding.SUSPECT
        if request_id not in suspects:
            return Finding.INNOCENT
        return Finding.CULPRIT if len(suspects) == 1 else Finding.SUSPECT


class Losses:
    """The losses that requests still refer to."""

    def __init__(self) -> None:
        self._losses: weakref.WeakSet[Loss] = weakref.WeakSet()

    def add(self, loss: Loss) -> None:
        self._losses.add(loss)

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        by_process = {verdict.incarnation: verdict for verdict in verdicts}
        for loss in self._losses:
            if loss.is_open and loss.process in by_process:
                loss.verdict = by_process[loss.process]
                log.info("how a lost worker ended: %s", loss.verdict.ended)

    def revive(self, process: int) -> None:
        """Acquits all requests of a process that counted as lost and reports again."""
        self.judge([Verdict(incarnation=process, ended="it answers again")])

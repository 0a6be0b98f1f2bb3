"""Lost worker processes, and what becomes known of their ends. No I/O.

Another worker, or its next process, reads the record that it left (worker/step_record.py) and
reports a verdict, through the controller or in its Welcome. A process that answers again was not
dead at all.

Only evidence convicts: a verdict that names the request alone, or an engine that hung while the
request ran alone. A loss of which nothing is known makes a request a suspect, no more.
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
    """What a loss says of one request that ran there."""

    INNOCENT = enum.auto()
    # It was in the step that crashed, with others; or there when something else than a step did,
    # such as a transport when its peer dies; or nothing is known.
    SUSPECT = enum.auto()
    CULPRIT = enum.auto()  # the step that crashed was its own


@dataclass(eq=False, slots=True, weakref_slot=True)
class Loss:
    """One loss of a worker's process, for all requests that ran there."""

    process: int  # its incarnation
    verdict: Verdict | None = None
    hung: bool = False  # its engine hung, so its later end acquits no request

    @property
    def is_open(self) -> bool:
        """Whether a verdict may come."""
        return not self.hung and self.verdict is None

    def finding(self, request_id: str, *, alone: bool = False) -> Finding:
        """Any attempt counts: a worker may still have run an earlier one. `alone`: it ran alone."""
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
        """The process was lost, and its engine reports again."""
        self.judge([Verdict(incarnation=process, ended="it answers again")])

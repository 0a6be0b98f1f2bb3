"""The canary: a small probe request to every idle worker, at intervals.

A worker that answers pings may still be unable to compute: a hung device, a damaged model. One
that fails its canary gets no requests until it passes one.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from baton.core.types import AttemptKey, Role, Sampling, Work
from baton.router.placement.placement import Placement, Policy, Reason
from baton.router.requests.admission import Assignment
from baton.router.requests.dispatch import Dispatcher
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0


async def run_canary(membership: Membership, dispatcher: Dispatcher, seconds: float) -> None:
    """Probes every idle worker at intervals of `seconds`, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        idle = [link for link in membership.links if _is_idle(link)]
        await asyncio.gather(*(_probe(link, dispatcher) for link in idle))


def _is_idle(link: WorkerLink) -> bool:
    busy = link.active or link.load.running or link.load.waiting
    return link.reported and not (busy or link.draining or link.leaving)


async def _probe(link: WorkerLink, dispatcher: Dispatcher) -> None:
    problem = await dispatcher.probe(_work(), _assignment(link), ANSWER_SECONDS)
    if problem:
        log.warning("worker %s failed its canary: %s", link.worker_id, problem)
    if link.welcome:
        link.note_canary(f"its canary failed: {problem}" if problem else "")


def _work() -> Work:
    """One token after token 0, which every vocabulary has."""
    return Work(AttemptKey(f"canary-{uuid.uuid4().hex}", 1), [0], Sampling(), 1, frozenset())


def _assignment(link: WorkerLink) -> Assignment:
    name = link.worker_id
    if link.role is Role.PREFILL:
        return Assignment(Placement(name, "", Policy.PREFILL, code=Reason.CANARY), link, None)
    return Assignment(Placement("", name, Policy.LOCAL, code=Reason.CANARY), None, link)

"""Requests of a router's own, beside a caller's: in no ledger and no latency metric."""

from __future__ import annotations

import time

from baton.core.types import Request, Work
from baton.router.answers.answer import Answer
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.trends import TokenTimes
from baton.router.prompts.text import Text
from baton.router.requests.dispatch import Dispatcher


async def run_aside(
    dispatcher: Dispatcher, text: Text, request: Request, work: Work
) -> list[AnswerDelta]:
    """What workers answer, whole. Raises BatonError."""
    deltas: list[AnswerDelta] = []

    def collect(event: AnswerEvent) -> None:
        if isinstance(event, AnswerDelta):
            deltas.append(event)

    answer = Answer(
        *(text, request, work, 0, collect),
        thinking=False,
        ledger=AnswerLedger(time.monotonic()),
        times=TokenTimes(),
        on_first_token=lambda ledger: None,
    )
    await dispatcher.run(work, request, answer)
    return deltas

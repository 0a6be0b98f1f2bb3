"""Runs a plan so that a request which breaks the engine breaks alone."""

from __future__ import annotations

from core.errors import BatonError
from engine.engine import Engine
from engine.sequence import Plan


def run_plan(engine: Engine, plan: Plan) -> list[int | BatonError | None]:
    """What each piece sampled, or the error of the pieces that failed.

    A typed error (such as logits that are not numbers) leaves every sequence
    as it was, so each piece of a failed step is tried again by itself.
    """
    try:
        return list(engine.step(plan))
    except BatonError as error:
        if len(plan) == 1:
            return [error]
        return [outcome for piece in plan for outcome in run_plan(engine, [piece])]

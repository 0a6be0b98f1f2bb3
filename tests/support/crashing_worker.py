"""A worker that certain requests crash, as bugs in kernels would. It finds its role by its name."""

from __future__ import annotations

import ctypes
import os
import sys

from baton.core.types import FinishReason, Role
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.engine.step import InFlightStep, Plan
from baton.worker.standalone import main

CULPRIT = [7, 11, 7, 11]
"""How a prompt begins that crashes every worker once it has an answer of some tokens."""

CRASHES = {"abort": 3, "segmentation fault": 4, "exception": 5, "exception after the step": 6}
"""How it crashes, by the token that follows."""

PROMPT_TOKENS, ANSWER_TOKENS = 30, 20


def crash_on_culprits() -> None:
    launch, append = Engine.launch, Sequence.append

    def crash(self: Engine, plan: Plan) -> InFlightStep:
        for sequence in plan:
            match way_to_crash(sequence):
                case "abort":
                    os.abort()
                case "segmentation fault":
                    ctypes.string_at(8)
                case "exception":
                    raise RuntimeError("device lost")
        return launch(self, plan)

    def crash_after(self: Sequence, token: int) -> FinishReason | None:
        if way_to_crash(self) == "exception after the step":
            raise IndexError("out of range")
        return append(self, token)

    Engine.launch = crash  # type: ignore[method-assign]
    Sequence.append = crash_after  # type: ignore[method-assign]


def way_to_crash(sequence: Sequence) -> str:
    """Empty for none."""
    first, answer = list(sequence.tokens[:5]), len(sequence.tokens) - PROMPT_TOKENS
    culprit = first[:4] == CULPRIT and answer > ANSWER_TOKENS
    return next((way for way, token in CRASHES.items() if culprit and token == first[4]), "")


if __name__ == "__main__":
    crash_on_culprits()
    name = sys.argv[sys.argv.index("--name") + 1]
    main(Role(name.partition("-")[0]))

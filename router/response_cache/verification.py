"""Verification of semantic hits: the served model says with one token whether two questions ask
the same.

The prompt has what never changes first, then the earlier question, then the new one: all but the
new one is found in the prefix cache when an answer is about to be given again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from baton.core.errors import BatonError
from baton.core.types import ChatPrompt, Message
from baton.v1 import timing_pb2

SAME, OTHER = "Yes", "No"

INSTRUCTIONS = f"""\
You compare two questions. Answer {SAME} if one answer is right for both: they ask for the same \
thing in other words. Answer {OTHER} if a number, a name, a date, a place, a negation or the \
direction differs, or if one asks for something else. Answer with one word.

Question 1: How tall is the Eiffel Tower?
Question 2: What is the height of the Eiffel Tower?
Answer: {SAME}

Question 1: How tall is the Eiffel Tower?
Question 2: How tall is the Tokyo Tower?
Answer: {OTHER}

Question 1: Turn the alarm on at 7
Question 2: Turn the alarm off at 7
Answer: {OTHER}"""


def verification_chat(earlier: str, question: str) -> ChatPrompt:
    """What the model is asked. Models that reason are asked not to."""
    pair = f"Question 1: {earlier}\nQuestion 2: {question}\nAnswer:"
    messages = Message("system", INSTRUCTIONS), Message("user", pair)
    return ChatPrompt(messages, template_kwargs='{"enable_thinking": false}')


class Verification:
    """Of one question. At most one hit is verified, for at most `seconds`."""

    def __init__(
        self, are_same: Callable[[str, str], Coroutine[None, None, bool]], seconds: float
    ) -> None:
        """`are_same` compares an earlier and a new question. It may raise BatonError."""
        self._are_same = are_same
        self._seconds = seconds
        self._ends = 0.0  # while the model is asked: when its answer is too late
        self.refused: timing_pb2.RefusedHit | None = None

    @property
    def seconds_left(self) -> float:
        """Until its answer is too late; 0 where the model is not being asked."""
        return max(0.0, self._ends - time.monotonic())

    async def confirms(self, earlier: str, question: str, similarity: float) -> bool:
        """Whether both ask the same. An answer that was kept without its question has none."""
        began = time.monotonic()
        self._ends = began + self._seconds
        same = None
        try:
            if earlier:
                async with asyncio.timeout(self._seconds):
                    same = await self._are_same(earlier, question)
        except (BatonError, TimeoutError):
            pass
        finally:
            self._ends = 0.0
        if same:
            return True
        self.refused = timing_pb2.RefusedHit(
            similarity=similarity, seconds=time.monotonic() - began, denied=same is False
        )
        return False

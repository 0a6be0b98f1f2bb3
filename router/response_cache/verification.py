"""Verification of semantic hits: the served model says with one token whether two questions ask
the same.

The prompt begins with the fixed instructions, then the earlier question, then the new one. So when
an earlier answer is found again, all but the new question is in the prefix cache.
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
    """Returns the chat for the model. Reasoning is turned off."""
    pair = f"Question 1: {earlier}\nQuestion 2: {question}\nAnswer:"
    messages = Message("system", INSTRUCTIONS), Message("user", pair)
    return ChatPrompt(messages, template_kwargs='{"enable_thinking": false}')


class Verification:
    """Verifies at most one hit of one question, within `seconds`."""

    def __init__(
        self, are_same: Callable[[str, str], Coroutine[None, None, bool]], seconds: float
    ) -> None:
        """`are_same` compares an earlier and a new question. It may raise BatonError."""
        self._are_same = are_same
        self._seconds = seconds
        self._ends = 0.0  # deadline of the model's answer; 0 while it is not asked
        self.refused: timing_pb2.RefusedHit | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until the model's answer is too late; 0 while it is not asked."""
        return max(0.0, self._ends - time.monotonic())

    async def confirms(self, earlier: str, question: str, similarity: float) -> bool:
        """Returns True if the model confirms that both ask the same. `earlier` is empty for an
        answer that was kept without its question, which is refused."""
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

"""A constant load; each answer must equal the undisturbed one, token by token."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from types import TracebackType

from baton import AsyncClient

AT_ONCE = 4
ANSWER_TOKENS = 120
# Between two requests of one client: starting processes need the machine too.
PAUSE_SECONDS = 0.3


@dataclass(frozen=True)
class Question:
    prompt: tuple[int, ...]
    temperature: float
    seed: int


# Greedy and sampled, of one page and of several.
QUESTIONS = [
    Question(tuple(range(1 + shift, 1 + shift + length)), temperature, seed=shift)
    for shift, length, temperature in ((0, 5, 0.0), (7, 40, 0.0), (3, 9, 0.9), (11, 70, 0.9))
]


class SteadyLoad:
    """Sends several requests at once while its block runs. Leaving raises the first problem: an
    error, or an answer that differs from the undisturbed one."""

    def __init__(
        self, *addresses: str, at_once: int = AT_ONCE, pause: float = PAUSE_SECONDS
    ) -> None:
        """`askers` clients use the routers in turn and pause after each answer."""
        self._at_once, self._pause = at_once, pause
        self._clients = [AsyncClient(address) for address in addresses]
        self._asked = itertools.count()
        self._expected: dict[Question, list[int]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        self.answers = 0
        self.moved = 0  # answers that took more than one attempt
        self.longest = 0.0  # seconds between two tokens, or before the first
        self.pairs: set[tuple[str, str]] = set()  # prefill and decode workers

    async def __aenter__(self) -> SteadyLoad:
        for question in QUESTIONS:
            self._expected[question] = await self._ask(self._clients[0], question)
        self.start_anew()
        self._tasks = [asyncio.create_task(self._keep_asking()) for _ in range(self._at_once)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving = True
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()
        wrong = [each for each in found if isinstance(each, BaseException)]
        if wrong and error is None:
            raise wrong[0]

    def start_anew(self) -> None:
        """Resets the counts."""
        self.answers = self.moved = 0
        self.longest = 0.0
        self.pairs = set()

    def expected(self, question: Question) -> list[int]:
        return self._expected[question]

    async def more(self, answers: int = 2 * AT_ONCE) -> None:
        """Returns when `count` more answers are complete."""
        wanted = self.answers + answers
        while self.answers < wanted:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)

    async def _keep_asking(self) -> None:
        while not self._leaving:
            number = next(self._asked)
            question = QUESTIONS[number % len(QUESTIONS)]
            client = self._clients[number % len(self._clients)]
            tokens = await self._ask(client, question, salt=str(number))
            assert tokens == self._expected[question], question
            await asyncio.sleep(self._pause)

    async def _ask(self, client: AsyncClient, question: Question, salt: str = "") -> list[int]:
        """Its own salt has each prompt computed and transferred every time."""
        tokens: list[int] = []
        last = time.monotonic()
        async with client.stream(
            list(question.prompt),
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            temperature=question.temperature,
            seed=question.seed,
            cache_salt=salt,
            timeout=120.0,
        ) as stream:
            async for delta in stream:
                now = time.monotonic()
                self.longest, last = max(self.longest, now - last), now
                tokens += delta.token_ids
        assert len(tokens) == ANSWER_TOKENS
        self.answers += 1
        placements = stream.answer.placements
        self.moved += len(placements) > 1
        self.pairs |= {(each.prefill_worker, each.decode_worker) for each in placements}
        return tokens

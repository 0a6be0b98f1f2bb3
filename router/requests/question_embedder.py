"""Embeds questions for the semantic cache, on the prefill pool: as requests to the embedding
model."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.core.errors import PromptTooLong
from baton.core.types import AttemptKey, Pooling, Request, Sampling, Work
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.requests.dispatch import Dispatcher
from baton.router.requests.side_requests import run_aside
from baton.router.response_cache.similar_questions import cosine

MOST_CHARACTERS = 16
"""Of a token, about: longer answers are cut before they are tokenized."""

INLINE_CHARACTERS = 512
"""Longer texts are tokenized in a thread; shorter ones take less than handing them to one."""


@dataclass(frozen=True, slots=True)
class QuestionEmbedder:
    model: EmbeddingModel
    dispatcher: Dispatcher
    threads: ThreadPoolExecutor

    async def compare(self, one: str, other: str, request: Request) -> float:
        """The similarity of two answers, as far as the model takes them. Raises BatonError."""
        first = await self._vector(await self._beginning(one), request)
        return cosine(first, await self._vector(await self._beginning(other), request))

    async def embed(self, text: str, request: Request) -> bytes:
        """The vector of a text, in float32, for a caller's request. Raises BatonError: a text that
        is too long for the model is not cut."""
        limit = self.model.max_tokens + 1
        if len(text) <= INLINE_CHARACTERS:
            tokens = self.model.text.encode(text, None, limit)
        else:
            loop = asyncio.get_running_loop()
            encode = self.model.text.encode
            tokens = await loop.run_in_executor(self.threads, encode, text, None, limit)
        if len(tokens) >= limit:
            raise PromptTooLong(f"the question has {len(tokens)} tokens", field="prompt")
        return await self._vector(tokens, request)

    async def _beginning(self, text: str) -> list[int]:
        """Its tokens, cut before the last one, which ends a text."""
        most = self.model.max_tokens
        cut = text[: MOST_CHARACTERS * most]
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(self.threads, self.model.text.encode, cut)
        return tokens if len(tokens) <= most else [*tokens[: most - 1], tokens[-1]]

    async def _vector(self, tokens: list[int], caller: Request) -> bytes:
        name, pooling = uuid.uuid4().hex, Pooling.ENCODER
        request = Request(
            *(name, tuple(tokens), Sampling()),
            max_tokens=0,
            pooling=pooling,
            tenant=caller.tenant,
            priority=caller.priority,
            deadline=caller.deadline,
        )
        key = AttemptKey(name, 1)
        work = Work(
            *(key, tokens, Sampling(), 1, frozenset()),
            priority=caller.priority,
            pooling=pooling,
        )
        deltas = await run_aside(self.dispatcher, self.model.text, request, work)
        return b"".join(each.embedding for each in deltas)

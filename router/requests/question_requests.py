"""The router's own requests for the semantic cache. They are in no ledger and no latency metric.

Questions are embedded by the embedding model, on the prefill pool. The served model decides whether
two questions ask the same (response_cache/verification.py), with one token, for which a prefill
worker is enough.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from baton.core.errors import PromptTooLong, UnsupportedModel
from baton.core.types import AttemptKey, Pooling, Prompt, Request, Sampling, Work
from baton.router.answers.answer import Answer
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.trends import TokenTimes
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.prompts.text import Text
from baton.router.requests.dispatch import Dispatcher
from baton.router.response_cache.similar_questions import cosine
from baton.router.response_cache.verification import OTHER, SAME, verification_chat
from baton.router.workers.membership import Membership

MAX_TOKEN_CHARACTERS = 16
"""About the most characters of a token: longer answers are cut before they are tokenized."""

INLINE_CHARACTERS = 512
"""Longer texts are tokenized in a thread; shorter ones take less time than the switch."""

BIAS = 100.0
"""The logit bias of yes and no: larger than any difference of logits, so no other token comes."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class QuestionRequests:
    """Each request takes tenant, priority and deadline from a caller's request. All methods raise
    BatonError."""

    embedding_model: EmbeddingModel
    text: Text  # of the served model
    membership: Membership
    dispatcher: Dispatcher
    threads: ThreadPoolExecutor

    async def embed(self, text: str, caller: Request) -> bytes:
        """Returns a text's float32 vector. Raises PromptTooLong instead of cutting a text."""
        encode, limit = self.embedding_model.text.encode, self.embedding_model.max_tokens + 1
        if len(text) <= INLINE_CHARACTERS:
            tokens = encode(text, None, limit)
        else:
            tokens = await self._in_thread(encode, text, None, limit)
        if len(tokens) >= limit:
            raise PromptTooLong(f"the question has {len(tokens)} tokens", field="prompt")
        return await self._vector(tokens, caller)

    async def compare(self, one: str, other: str, caller: Request) -> float:
        """Returns the similarity of two answers, each cut to what the embedding model takes."""
        first = await self._vector(await self._cut_tokens(one), caller)
        return cosine(first, await self._vector(await self._cut_tokens(other), caller))

    async def are_same(self, earlier: str, question: str, caller: Request) -> bool:
        """Asks the served model whether both questions ask the same."""
        request, work = await self._in_thread(self._verification, earlier, question, caller)
        deltas = await self._run(self.text, request, work)
        return work.sampling.logit_bias[0][0] in deltas[0].token_ids

    async def _cut_tokens(self, text: str) -> list[int]:
        """Returns a text's tokens, as many as fit, with the end token."""
        most = self.embedding_model.max_tokens
        cut = text[: MAX_TOKEN_CHARACTERS * most]
        tokens = await self._in_thread(self.embedding_model.text.encode, cut)
        return tokens if len(tokens) <= most else [*tokens[: most - 1], tokens[-1]]

    async def _vector(self, tokens: list[int], caller: Request) -> bytes:
        request = _request(caller, tuple(tokens), Sampling(), 0, pooling=Pooling.ENCODER)
        deltas = await self._run(self.embedding_model.text, request, _work(request, tokens))
        return b"".join(each.embedding for each in deltas)

    def _verification(self, earlier: str, question: str, caller: Request) -> tuple[Request, Work]:
        words = yes_and_no(self.text)
        sampling = Sampling(logit_bias=tuple((word, BIAS) for word in words))
        chat = verification_chat(earlier, question)
        # With the caller's salt, its questions are in no pages that others can use.
        request = _request(caller, chat, sampling, 1, cache_salt=caller.cache_salt)
        context = self.membership.context_length()
        prompt = self.text.prepare(request, context, self.membership.page_naming)
        if len(prompt.tokens) >= context:
            raise PromptTooLong("the two questions exceed the context", field="prompt")
        return request, _work(request, prompt.tokens, prompt.page_keys)

    async def _run(self, text: Text, request: Request, work: Work) -> list[AnswerDelta]:
        """Returns the workers' whole answer."""
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
        await self.dispatcher.run(work, request, answer)
        return deltas

    async def _in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, work, *arguments)


def _request(
    caller: Request,
    prompt: Prompt,
    sampling: Sampling,
    max_tokens: int,
    *,
    pooling: Pooling | None = None,
    cache_salt: str = "",
) -> Request:
    return Request(
        *(uuid.uuid4().hex, prompt, sampling, max_tokens),
        pooling=pooling,
        cache_salt=cache_salt,
        tenant=caller.tenant,
        priority=caller.priority,
        deadline=caller.deadline,
    )


def _work(request: Request, tokens: list[int], page_keys: Sequence[bytes] = ()) -> Work:
    return Work(
        *(AttemptKey(request.request_id, 1), tokens, request.sampling, 1, frozenset()),
        cache_salt=request.cache_salt,
        priority=request.priority,
        pooling=request.pooling,
        page_keys=page_keys,
    )


def yes_and_no(text: Text) -> tuple[int, int]:
    """Returns the first tokens of the words for yes and no."""
    same, other = (text.encode(word, add_special_tokens=False)[0] for word in (SAME, OTHER))
    if same == other:
        raise UnsupportedModel("the model's words for yes and no begin with the same token")
    return same, other

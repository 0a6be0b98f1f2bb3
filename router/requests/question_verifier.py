"""Asks the served model whether two questions ask the same (response_cache/verification.py): one
token, which a prefill worker computes alone."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.core.errors import PromptTooLong, UnsupportedModel
from baton.core.types import AttemptKey, Request, Sampling, Work
from baton.router.prompts.text import Text
from baton.router.requests.dispatch import Dispatcher
from baton.router.requests.side_requests import run_aside
from baton.router.response_cache.verification import OTHER, SAME, verification_chat
from baton.router.workers.membership import Membership

BIAS = 100.0
"""Of the two words: far more than logits differ, so that no other token comes."""


@dataclass(frozen=True, slots=True)
class QuestionVerifier:
    text: Text
    membership: Membership
    dispatcher: Dispatcher
    threads: ThreadPoolExecutor

    async def are_same(self, earlier: str, question: str, caller: Request) -> bool:
        """For a caller's request. Raises BatonError."""
        loop = asyncio.get_running_loop()
        request, work = await loop.run_in_executor(
            self.threads, self._prepared, earlier, question, caller
        )
        deltas = await run_aside(self.dispatcher, self.text, request, work)
        return work.sampling.logit_bias[0][0] in deltas[0].token_ids

    def _prepared(self, earlier: str, question: str, caller: Request) -> tuple[Request, Work]:
        words = yes_and_no(self.text)
        sampling = Sampling(logit_bias=tuple((word, BIAS) for word in words))
        request = Request(
            *(uuid.uuid4().hex, verification_chat(earlier, question), sampling),
            max_tokens=1,
            tenant=caller.tenant,
            priority=caller.priority,
            deadline=caller.deadline,
            # The caller's, so that its questions are in no pages of others.
            cache_salt=caller.cache_salt,
        )
        context = self.membership.context_length()
        prompt = self.text.prepare(request, context, self.membership.page_naming)
        if len(prompt.tokens) >= context:
            raise PromptTooLong("two questions exceed the context", field="prompt")
        work = Work(
            *(AttemptKey(request.request_id, 1), prompt.tokens, sampling, 1, frozenset()),
            cache_salt=caller.cache_salt,
            priority=caller.priority,
            page_keys=prompt.page_keys,
        )
        return request, work


def yes_and_no(text: Text) -> tuple[int, int]:
    """The tokens that say yes and no: the first ones of these words."""
    same, other = (text.encode(word, add_special_tokens=False)[0] for word in (SAME, OTHER))
    if same == other:
        raise UnsupportedModel("the model's tokens do not tell yes from no")
    return same, other

"""Makes what is told of one answer from its tokens: text, its parts, and how likely each token was.

Called for each token, so it tells of it before it returns.
"""

from __future__ import annotations

from baton.core.types import ChatPrompt, FinishReason, Request, Work
from baton.router.answers.answer import AnswerText
from baton.router.answers.answer_clock import AnswerClock
from baton.router.answers.answer_events import AnswerDelta, Emit, Finished, ScoredToken, Started
from baton.router.answers.logprobs import scored_prompt, scored_tokens
from baton.router.answers.parts import Plain
from baton.router.placement.placement import Placement
from baton.router.prompts.text import Text
from baton.router.requests.attempt import Tokens


class AnswerMaker:
    """Listens to the dispatcher (router/requests/dispatch.py)."""

    def __init__(
        self,
        text: Text,
        request: Request,
        work: Work,
        clock: AnswerClock,
        emit: Emit,
        index: int,
        *,
        opened: bool,
    ) -> None:
        """`opened`: the prompt has opened the answer's thoughts."""
        chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
        self._text = text
        self._request = request
        self._work = work
        self._clock = clock
        self._emit = emit
        self._index = index
        self._splitter = text.answers.splitter(chat, opened=opened)
        marks = not isinstance(self._splitter, Plain)
        self._answer = AnswerText(text.detokenizer(marks=marks), request.stop)
        self._called = False
        self._placements: list[Placement] = []
        self._cached_tokens = self._fetched_tokens = 0

    def place(self, placement: Placement) -> None:
        self._placements.append(placement)
        if len(self._placements) == 1:
            self._emit(self._started(placement))

    def take(self, tokens: Tokens) -> bool:
        first = not self._clock.ledger.tokens
        self._clock.tokens(len(tokens.token_ids))
        delta = self._answer.push(tokens)
        over = self._answer.finish is not None
        self._clock.ledger.tell(finished=over)
        parts = self._splitter.push(delta.text)
        if over:
            parts += self._splitter.flush()
        if parts.tool_calls:
            self._called = True
        prompt_scores = self._begin(tokens) if first else []
        if delta.token_ids or delta.text:
            scored = scored_tokens(self._text, delta.token_ids, delta.logprobs)
            said = parts.text, delta.token_ids, self._index
            self._emit(AnswerDelta(*said, scored, parts.reasoning, parts.tool_calls, prompt_scores))
        return not over

    def finished(self) -> Finished:
        """What is told of the answer when it is over."""
        answer = self._answer
        assert answer.finish is not None
        return Finished(
            _finish(answer.finish, self._called),
            len(self._work.prompt_tokens),
            answer.count,
            answer.stop,
            tuple(self._placements),
            self._index,
            self._work.sampling.seed,
            self._cached_tokens,
            self._fetched_tokens,
        )

    def _started(self, placement: Placement) -> Started:
        return Started(
            request_id=self._request.request_id,
            prompt_tokens=len(self._work.prompt_tokens),
            prefill_worker=placement.prefill,
            decode_worker=placement.decode,
            seed=self._request.sampling.seed,
            answers=self._request.n,
        )

    def _begin(self, first: Tokens) -> list[ScoredToken]:
        """How likely the prompt's tokens were, which comes with the answer's first."""
        self._cached_tokens, self._fetched_tokens = first.cached_tokens, first.fetched_tokens
        if self._request.prompt_logprobs is None:
            return []
        return scored_prompt(self._text, self._work.prompt_tokens, first.prompt_logprobs)


def _finish(reason: FinishReason, called: bool) -> FinishReason:
    return FinishReason.TOOL_CALLS if called and reason is FinishReason.STOP else reason

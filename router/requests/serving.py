"""One request from text to text: what every edge (gRPC, HTTP) calls.

Between the edge and the dispatcher: the prompt becomes tokens, the tokens become
text, stop strings end the answer (router/answers/answer_maker.py), and the times are
measured (router/observe/ledger.py). Tokens are pushed: whatever a worker's message adds to
an answer is emitted to the edge before the next answer's turn comes. Several answers
to one request share its prompt's tokens and its fate; each is dispatched by itself,
may be tried again by itself, and has a seed of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from baton.core.config import RouterConfig
from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidGrammar,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfRange,
    Unavailable,
)
from baton.core.types import (
    AttemptKey,
    ChatPrompt,
    FinishReason,
    Prompt,
    Request,
    Work,
)
from baton.router.answers.answer_clock import AnswerClock
from baton.router.answers.answer_events import AnswerEvent, Emit, Started
from baton.router.answers.answer_maker import AnswerMaker
from baton.router.observe.demand import Demand
from baton.router.observe.ledger import AnswerLedger, Ledgers, RequestLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.trends import Trends
from baton.router.placement.placer import Placer
from baton.router.prompts.output_grammar import behind_thoughts, either, grammar_of
from baton.router.prompts.prompt import read_prompt
from baton.router.prompts.text import Text
from baton.router.requests.admission import Admission
from baton.router.requests.dispatch import Dispatcher
from baton.router.workers.membership import Membership

GRAMMAR_SECONDS = 5.0
"""How long a structure may take to read. Most take a millisecond."""


Result = TypeVar("Result")


class Serving:
    def __init__(
        self,
        text: Text,
        membership: Membership,
        placer: Placer,
        config: RouterConfig,
        metrics: RouterMetrics,
    ) -> None:
        self.text = text
        self._membership = membership
        self.placer = placer
        self._config = config
        self._metrics = metrics
        self.admission = Admission(membership, placer, config, metrics)
        self.dispatcher = Dispatcher(membership, placer, self.admission, config, metrics)
        self._threads = ThreadPoolExecutor(config.text_threads, thread_name_prefix="text")
        self.active = 0
        self.idle = asyncio.Event()  # set while nothing is active
        self.idle.set()
        self.finished = 0
        self.ledgers = Ledgers()
        self.trends = Trends()
        self.demand = Demand()
        self.draining = False  # no new requests are taken

    async def generate(
        self, request: Request, ledger: RequestLedger, emit: Emit, place: int = 0
    ) -> None:
        """Tells of the answers as they are made. Cancelling this cancels the request.

        `place` is the request's among those that the ledger's call has.
        """
        self.demand.arrive(request.n)
        self._let_in(request.n)
        outcome = "CANCELLED"
        self._count(+request.n)
        try:
            entries = ledger.answers[place * request.n : (place + 1) * request.n]
            reasons = await self._answers(request, entries, emit)
            outcome = reasons[-1].name
        except Exception as error:
            outcome = error.reason if isinstance(error, BatonError) else Internal.reason
            raise
        finally:
            self._count(-request.n)
            self.finished += 1
            ledger.outcome = outcome
            self._metrics.requests.labels(outcome=outcome).inc()

    def _let_in(self, answers: int) -> None:
        if self.draining:
            raise Unavailable("this router is about to stop and takes no new requests")
        if self.active + answers > self._config.max_requests:
            self._metrics.requests.labels(outcome=Exhausted.reason).inc()
            raise Exhausted(
                f"{self.active} requests are under way already; try again later",
                retry_after=self.admission.retry_after,
            )

    async def tokenize(self, prompt: Prompt) -> tuple[list[int], str]:
        """The prompt's tokens and, for a chat, the text that they were made of."""
        rendered = ""
        if isinstance(prompt, ChatPrompt):
            rendered = await self._off_loop(self.text.render, prompt)
        return await self._off_loop(self.text.encode, prompt), rendered

    async def decode(self, token_ids: list[int], keep_special: bool) -> str:
        return await self._off_loop(self.text.decode, token_ids, keep_special)

    async def _off_loop(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Runs what takes long for a long text in a thread, so that other requests go on."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    async def _answers(
        self, request: Request, entries: Sequence[AnswerLedger], emit: Emit
    ) -> list[FinishReason]:
        """Why each answer to the request has ended."""
        prepared = await self._prepare(request, entries)
        self._check_deadline(request, prepared.work)
        self._metrics.prompt_tokens.inc(len(prepared.work.prompt_tokens))
        if request.n > 1:
            emit = _started_once(emit)
        return await gather_all(
            [self._answer(request, prepared, emit, *entry) for entry in enumerate(entries)]
        )

    async def _answer(
        self, request: Request, prepared: _Prepared, emit: Emit, index: int, ledger: AnswerLedger
    ) -> FinishReason:
        work = _work_for(prepared.work, index)
        clock = AnswerClock(self._metrics, self.trends, self.demand, self.placer.costs, ledger)
        maker = AnswerMaker(self.text, request, work, clock, emit, index, opened=prepared.opened)
        await self.dispatcher.run(work, ledger, maker)
        clock.end(self.placer.page_size)
        finished = maker.finished()
        self.placer.costs.note_answer(finished.completion_tokens)
        emit(finished)
        return finished.reason

    async def _prepare(self, request: Request, entries: Sequence[AnswerLedger]) -> _Prepared:
        """What workers are to do, for the first answer."""
        # Workers report how much they hold, so some must be there.
        await self.admission.wait_ready()
        context = self._membership.context_length()
        read = await self._off_loop(
            read_prompt, self.text, request, context, self._membership.cache_names
        )
        tokens = read.tokens
        for entry in entries:
            entry.prepare(read.template_seconds, read.tokenize_seconds, len(tokens))
        self._check(tokens, context)
        self._check_biases(request)
        grammar = await self._grammar(request, opened=read.opened)
        room = context - len(tokens)
        stops = request.stop_token_ids
        if grammar or not request.ignore_eos:
            stops |= self.text.eos_token_ids
        work = Work(
            # The caller's request_id need not be unique; the workers' key must be.
            key=AttemptKey(uuid.uuid4().hex, 1),
            prompt_tokens=tokens,
            sampling=request.sampling,
            max_tokens=min(request.max_tokens or room, room),
            stop_token_ids=stops,
            cache_salt=request.cache_salt,
            logprobs=request.logprobs,
            grammar=grammar,
            prompt_logprobs=request.prompt_logprobs,
            # What is cached is of no use where all is to be scored.
            page_keys=read.page_keys if request.prompt_logprobs is None else (),
        )
        return _Prepared(work, read.opened)

    async def _grammar(self, request: Request, *, opened: bool) -> str:
        """What answers must read as; empty where they may be anything."""
        structures = self.text.answers.structures(request, self.text.special_id)
        if not structures:
            return ""
        if not self.text.eos_token_ids:
            raise InvalidGrammar("this model has no end token, which structured answers need")
        try:
            async with asyncio.timeout(GRAMMAR_SECONDS):
                grammars = [await self._off_loop(grammar_of, each) for each in structures]
        except TimeoutError:
            raise InvalidGrammar("the structure took too long to read", field="grammar") from None
        grammar = either(*grammars) if len(grammars) == 2 else grammars[0]
        return behind_thoughts(grammar) if opened else grammar

    def _check_deadline(self, request: Request, work: Work) -> None:
        """Refuses what its caller would wait for in vain, once times have been measured."""
        left = request.deadline - time.monotonic()
        if left == math.inf or not self.placer.costs.knows_prompts:
            return
        needed = self.placer.soonest(work)
        if needed > left:
            raise DeadlineExceeded(
                f"the first token is predicted in {needed:.2f} seconds, and the deadline leaves"
                f" {max(left, 0):.2f}"
            )

    def _check(self, tokens: list[int], context: int) -> None:
        if not tokens:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if len(tokens) >= context:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; with room for an answer the context"
                f" holds {context - 1}",
                field="prompt",
            )
        if max(tokens) >= self.text.vocabulary_size:
            raise TokenOutOfRange(
                f"token id {max(tokens)} is outside the vocabulary of {self.text.vocabulary_size}",
                field="token_ids",
            )

    def _check_biases(self, request: Request) -> None:
        size = self.text.vocabulary_size
        outside = [token for token, _ in request.sampling.logit_bias if token >= size]
        if outside:
            raise TokenOutOfRange(
                f"logit_bias names token {outside[0]}, outside the vocabulary of {size}",
                field="logit_bias",
            )

    def _count(self, change: int) -> None:
        self.active += change
        if self.active:
            self.idle.clear()
        else:
            self.idle.set()
        self._metrics.active.set(self.active)


@dataclass(frozen=True, slots=True)
class _Prepared:
    work: Work
    opened: bool


def _started_once(emit: Emit) -> Emit:
    """The first answer that is placed starts the request."""
    started = False

    def emit_once(event: AnswerEvent) -> None:
        nonlocal started
        if not (started and isinstance(event, Started)):
            emit(event)
        started = True

    return emit_once


def _work_for(work: Work, index: int) -> Work:
    """The same work for another answer: with a name and a seed of its own."""
    key = AttemptKey(f"{work.key.request_id}#{index}", work.key.epoch)
    return dataclasses.replace(work, key=key, sampling=work.sampling.for_answer(index))


async def gather_all(works: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """The results in order. An error of one, or cancelling this, cancels all of them and waits for
    their ends."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

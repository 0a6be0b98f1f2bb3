"""Serves one request to one model, from text to text. Every edge (gRPC, HTTP) calls this.

Between edge and dispatcher: the prompt becomes tokens (router/prompts/text.py), the tokens of each
answer become text (router/answers/answer.py), and times are measured (router/observe/ledger.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.core.bounds import check_vocabulary
from baton.core.config import RouterConfig
from baton.core.errors import (
    BatonError,
    Exhausted,
    Internal,
    InvalidGrammar,
    InvalidRequest,
    NotServed,
    PromptTooLong,
    TokenOutOfRange,
    Unavailable,
    UnknownModel,
)
from baton.core.page_keys import PageNaming
from baton.core.types import (
    AttemptKey,
    ChatPrompt,
    FinishReason,
    Pooling,
    Prompt,
    Request,
    Sampling,
    Work,
)
from baton.router.answers.answer_events import Emit
from baton.router.observe.ledger import AnswerLedger, Ledgers, RequestLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.trends import Demand, Trends
from baton.router.placement.placer import Placer
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.prompts.output_grammar import grammar_of
from baton.router.prompts.text import Text, TokenizedPrompt
from baton.router.requests.adapter_names import AdapterNames
from baton.router.requests.admission import Admission
from baton.router.requests.answering import Answering, AnswerTask, gather_all
from baton.router.requests.dispatch import Dispatcher
from baton.router.requests.question_requests import QuestionRequests
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.workers.membership import Membership

GRAMMAR_SECONDS = 5.0
"""Time limit for checking a structure. Most take a millisecond."""

Result = TypeVar("Result")


class ActiveRequests:
    """Counts the requests of a model, or of a whole router."""

    def __init__(self) -> None:
        self.active = 0
        self.idle = asyncio.Event()  # set while nothing is active
        self.idle.set()

    def count(self, change: int) -> None:
        self.active += change
        if self.active:
            self.idle.clear()
        else:
            self.idle.set()


class Activity(ActiveRequests):
    """What a router's models share: the request limit, the ledgers, the text threads."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.limit = config.max_requests
        self.finished = 0
        self.draining = False  # no new requests are accepted
        self.ledgers = Ledgers()
        self.threads = ThreadPoolExecutor(config.text_threads, thread_name_prefix="text")


class Serving(ActiveRequests):
    def __init__(
        self,
        text: Text,
        membership: Membership,
        placer: Placer,
        config: RouterConfig,
        metrics: RouterMetrics,
        activity: Activity,
        responses: CachedResponses | None = None,
        adapters: AdapterNames | None = None,
        embedding_model: EmbeddingModel | None = None,
    ) -> None:
        super().__init__()
        self.text = text
        self.adapters = adapters or AdapterNames()
        self.embedding_model = embedding_model
        self._membership = membership
        self.placer = placer
        self._config = config
        self._metrics = metrics
        self._responses = responses
        self.admission = Admission(membership, placer, config, metrics)
        self.dispatcher = Dispatcher(membership, placer, self.admission, config, metrics)
        self.activity = activity
        self._threads = activity.threads
        metrics.active.set_function(lambda: self.active)
        self.trends = Trends(metrics.tokens)
        self.demand = Demand()
        self.closed = False  # the model was removed
        questions = None
        if embedding_model:
            questions = QuestionRequests(
                embedding_model, text, membership, self.dispatcher, activity.threads
            )
        self._answering = Answering(
            text,
            membership,
            self.dispatcher,
            metrics,
            self.trends,
            self.demand,
            responses,
            questions,
        )

    async def generate(
        self, request: Request, ledger: RequestLedger, emit: Emit, index: int = 0
    ) -> None:
        """Emits the answers as they are generated. Cancelling this cancels the request.

        `index` is the request's number among those of the ledger's call, which number their
        answers consecutively.
        """
        outcome = "CANCELLED"
        first = index * request.n
        entries = ledger.answers[first : first + request.n]
        try:
            with self.adapters.running(request):
                reasons = await self._generate(request, entries, first, emit)
            outcome = reasons[-1].name
        except Exception as error:
            outcome = error.reason if isinstance(error, BatonError) else Internal.reason
            raise
        finally:
            self.activity.finished += 1
            ledger.outcome = outcome
            self._metrics.requests.labels(outcome=outcome).inc()
            if any(entry.attempts for entry in entries):
                self._metrics.prompt_tokens.inc(entries[0].prompt_tokens)

    async def generate_all(
        self, requests: Sequence[Request], ledger: RequestLedger, emit: Emit
    ) -> None:
        """Generates for all requests of a call. The first error ends all."""
        answers = len(ledger.answers)
        self.demand.arrive(answers)
        self._check_capacity(requests[0], answers)
        self.count(+answers)
        self.activity.count(+answers)
        calls = [self.generate(each, ledger, emit, index) for index, each in enumerate(requests)]
        try:
            await gather_all(calls)
        finally:
            self.count(-answers)
            self.activity.count(-answers)

    def _check_capacity(self, request: Request, answers: int) -> None:
        """Raises unless the `answers` of a call, whose first request this is, may run."""
        activity = self.activity
        if self.closed:
            raise UnknownModel(f"the model {request.model!r} was removed", field="model")
        if activity.draining:
            raise Unavailable("this router is about to stop and accepts no new requests")
        excess = activity.active + answers - activity.limit
        if excess > 0 and not self.admission.make_room(request.priority, request.tenant, excess):
            self._metrics.requests.labels(outcome=Exhausted.reason).inc()
            raise Exhausted(
                f"{activity.active} requests are running already; try again later",
                retry_after=self.admission.retry_after,
            )

    async def tokenize(
        self, prompt: Prompt, add_special_tokens: bool = True
    ) -> tuple[list[int], str]:
        """Returns the prompt's tokens and, for a chat, the rendered text."""
        rendered = ""
        if isinstance(prompt, ChatPrompt):
            rendered = await self._in_thread(self.text.render, prompt)
        encode = functools.partial(self.text.encode, add_special_tokens=add_special_tokens)
        return await self._in_thread(encode, prompt, rendered), rendered

    async def detokenize(
        self, token_ids: Sequence[int], keep_special: bool, field: str = "token_ids"
    ) -> str:
        """Like `decode`, but refuses what would be no text for want of a tokenizer."""
        if not self.text.has_tokenizer:
            raise InvalidRequest("this model has no tokenizer", field=field)
        return await self.decode(token_ids, keep_special, field)

    async def decode(
        self, token_ids: Sequence[int], keep_special: bool, field: str = "token_ids"
    ) -> str:
        return await self._in_thread(self.text.decode, token_ids, keep_special, field)

    async def _in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Runs work on texts in a thread, since long texts would block the loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    async def _generate(
        self, request: Request, entries: Sequence[AnswerLedger], first: int, emit: Emit
    ) -> list[FinishReason]:
        """Returns each answer's finish reason."""
        if request.stop and not self.text.has_tokenizer:
            raise NotServed("this model has no tokenizer, which stop strings need", field="stop")
        # The context length is known once a worker is attached.
        await self.admission.wait_ready()
        if self._responses is None:
            self.admission.check_wait(request)
        text, context, naming = self._prompt_rules(request)
        prompt = await self._in_thread(text.prepare, request, context, naming)
        for entry in entries:
            entry.prepare(prompt.template_seconds, prompt.tokenize_seconds, len(prompt.tokens))
        _check_tokens(request, prompt.tokens, context, text.vocabulary_size)
        grammar = await self._grammar(request, thinking=prompt.thinking)
        work = self._work(request, prompt, context, grammar)
        task = AnswerTask(request, work, first, entries, thinking=prompt.thinking)
        try:
            return await self._answering.run(task, emit)
        except InvalidGrammar as error:  # a worker's, which does not know the field
            error.field = request.structure.request_field if request.structure else "tools"
            raise

    def _prompt_rules(self, request: Request) -> tuple[Text, int, PageNaming | None]:
        """Returns the tokenizer for the request's prompt, the length that it must stay below, and
        the naming of its pages."""
        if request.pooling is Pooling.ENCODER and self.embedding_model:
            return self.embedding_model.text, self.embedding_model.max_tokens + 1, None
        return self.text, self._membership.context_length(), self._membership.page_naming

    def _work(self, request: Request, prompt: TokenizedPrompt, context: int, grammar: str) -> Work:
        room = context - len(prompt.tokens)
        # Also without an answer, one token is needed to score a prompt.
        wanted = room if request.max_tokens is None else max(1, request.max_tokens)
        stops = request.stop_token_ids
        if grammar or not request.ignore_eos:
            stops |= self.text.eos_token_ids
        work = Work(
            # The caller's request_id need not be unique; the workers' key must be.
            key=AttemptKey(uuid.uuid4().hex, 1),
            prompt_tokens=prompt.tokens,
            sampling=_without_end_words(request.sampling, self.text.eos_token_ids),
            max_tokens=min(wanted, room),
            stop_token_ids=stops,
            cache_salt=request.cache_salt,
            retain_seconds=request.retain_seconds,
            logprobs=request.logprobs,
            grammar=grammar,
            prompt_logprobs=request.prompt_logprobs,
            prediction=prompt.prediction,
            adapter=request.adapter,
            priority=request.priority,
            pooling=request.pooling,
            page_keys=prompt.page_keys,
        )
        if len(request.resumed) > work.max_tokens:
            raise InvalidRequest(
                f"the answer has at most {work.max_tokens} tokens, not {len(request.resumed)}",
                field="resumed_token_ids",
            )
        # Cached pages cannot be used if every row of the prompt is needed.
        return dataclasses.replace(work, page_keys=()) if work.needs_all_rows else work

    async def _grammar(self, request: Request, *, thinking: bool) -> str:
        """Returns the grammar that answers must follow; "" without one."""
        answers, special_id = self.text.answers, self.text.special_id
        structures = answers.structures(request, special_id)
        if not structures:
            return ""
        if not self.text.eos_token_ids:
            raise InvalidGrammar("this model has no end token, which structured answers need")
        try:
            async with asyncio.timeout(GRAMMAR_SECONDS):
                grammars = [await self._in_thread(grammar_of, each) for each in structures]
        except TimeoutError:
            field = structures[0].request_field
            raise InvalidGrammar("the structure took too long to check", field=field) from None
        return answers.composed(grammars, request, special_id, thinking=thinking)


def _without_end_words(sampling: Sampling, eos_token_ids: frozenset[int]) -> Sampling:
    """Drops end tokens from the bad words, as transformers does."""
    ends = {(token,) for token in eos_token_ids}
    if ends.isdisjoint(sampling.bad_words_ids):
        return sampling
    kept = tuple(word for word in sampling.bad_words_ids if word not in ends)
    return dataclasses.replace(sampling, bad_words_ids=kept)


def _check_tokens(request: Request, tokens: list[int], context: int, size: int) -> None:
    if not tokens:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if len(tokens) >= context:
        room = "the model takes" if request.pooling else "with room for an answer the context holds"
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens; {room} {context - 1}", field="prompt"
        )
    check_vocabulary(tokens, size)
    check_vocabulary(request.resumed, size, "resumed_token_ids")
    outside = [token for token, _ in request.sampling.logit_bias if token >= size]
    if outside:
        raise TokenOutOfRange(
            f"logit_bias names token {outside[0]}, outside the vocabulary of {size}",
            field="logit_bias",
        )

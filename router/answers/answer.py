"""One answer: turns its tokens into text, reasoning, tool calls and log probabilities for its edge.

    Tokens ─▶ ledger ─▶ detokenizer ─▶ stop strings ─▶ splitter ─▶ AnswerDelta

Runs for every token, in plain calls: the delta is emitted before `push` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from baton.core.errors import InvalidRequest
from baton.core.types import ChatPrompt, FinishReason, Logprobs, Request, Work
from baton.core.wire import finish_to
from baton.router.answers.answer_events import (
    AnswerDelta,
    Emit,
    ScoredToken,
    TokenScore,
)
from baton.router.answers.answer_format import AnswerFormat
from baton.router.answers.detokenizer import Detokenizer
from baton.router.answers.splitters import (
    ContentSplitter,
    HarmonySplitter,
    ReasoningSplitter,
    Splitter,
    held_back,
)
from baton.router.answers.tool_call_splitter import ToolCallSplitter
from baton.router.answers.tool_formats import HARMONY
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.trends import TokenTimes
from baton.router.placement.placement import Placement
from baton.router.prompts.text import Text
from baton.router.requests.attempt import Tokens, merge_tokens
from baton.rpc import redact
from baton.v1 import inference_pb2 as pb


class CachedAnswer(NamedTuple):
    """An answer as the response cache keeps it."""

    tokens: Tokens
    call_ids: Sequence[str]  # of its tool calls, which are random


class StopStrings:
    """Cuts an answer before its first stop string: the one that starts earliest.

    A match waits while an earlier start is open: with "bc" and "abcd", after "abc" the next
    character decides whether the text ends before "bc" or before "abcd". Of stop strings with the
    same start, the longest within the text so far is the hit.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", field="stop")
        self.hit = ""
        self.strings = sorted(stops, key=len, reverse=True)
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> str:
        """Returns the text that can no longer be part of a stop string; all of it if this is the
        last text."""
        if self.hit:
            return ""
        text = self._held + text
        sure = len(text) if last else len(text) - held_back(text, self.strings)
        starts = [(text.find(stop), stop) for stop in self.strings if stop in text]
        if starts and (first := min(starts, key=itemgetter(0)))[0] <= sure:
            sure, self.hit = first
        self._held = text[sure:]
        return text[:sure]


class AnswerText:
    """Turns tokens into text; `finish` is set once the answer is over.

    The token that ends an answer counts as one of its tokens but adds no text. Tokens after a
    stop string are dropped.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self.stops = StopStrings(stops)
        self.finish: FinishReason | None = None
        self.count = 0  # tokens of the answer

    def push(self, tokens: list[int], finish: FinishReason | None) -> str:
        """Returns the text that the tokens add."""
        with_text = tokens[:-1] if finish is FinishReason.STOP else tokens
        if self.stops.strings:
            return self._push_each(len(tokens), with_text, finish)
        self.count += len(tokens)
        self.finish = finish
        text = self._detokenizer.push(with_text)
        return text + self._detokenizer.flush() if finish else text

    def _push_each(self, count: int, with_text: list[int], finish: FinishReason | None) -> str:
        """Pushes one token at a time, to know which one completes a stop string."""
        text, stops = "", self.stops
        for seen, token in enumerate(with_text, start=1):
            text += stops.push(self._detokenizer.push([token]))
            if stops.hit:
                self.count += seen
                self.finish = FinishReason.STOP
                return text
        self.count += count
        if finish:
            text += stops.push(self._detokenizer.flush(), last=True)
            self.finish = FinishReason.STOP if stops.hit else finish
        return text


class NoText(AnswerText):
    """The text of a request that only scores its prompt: drops its one token."""

    def push(self, tokens: list[int], finish: FinishReason | None) -> str:
        self.finish = FinishReason.LENGTH
        return ""


class Answer:
    """Turns placements and tokens from the dispatcher into events."""

    def __init__(
        self,
        text: Text,
        request: Request,
        work: Work,
        index: int,
        emit: Emit,
        *,
        thinking: bool,
        ledger: AnswerLedger,
        times: TokenTimes,
        on_first_token: Callable[[AnswerLedger], None],
        cached: CachedAnswer | None = None,
        record: bool = False,
    ) -> None:
        """`thinking`: the prompt ends within the reasoning. `cached`: the answer to replay.
        `record`: keep the tokens for `recorded`."""
        chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
        self.ledger = ledger
        self._model = text
        self._request = request
        self._work = work
        self._index = index
        self._emit = emit
        self._times = times
        self._on_first_token = on_first_token
        self._cached_answer = cached
        known = iter(cached.call_ids if cached else ())
        make_id = text.answers.tools.new_id
        self._splitter = splitter_for(
            text.answers, chat, thinking=thinking, new_id=lambda: next(known, "") or make_id()
        )
        markers = not isinstance(self._splitter, ContentSplitter)
        detokenizer = text.detokenizer(markers=markers, skip_special=request.skip_special_tokens)
        kind = NoText if request.max_tokens == 0 else AnswerText
        self._text = kind(detokenizer, request.stop)
        self._call_ids: list[str] = []  # of called tools
        self._recorded: list[Tokens] | None = [] if record else None
        self._placements: list[pb.Placement] = []
        self._cached: tuple[int, int] | None = None  # of the first attempt with tokens

    def placed(self, placement: Placement) -> None:
        """Notes the placement of an attempt."""
        self.ledger.place(placement)
        self._placements.append(_public(placement))
        if len(self._placements) == 1:
            self._start(placement.prefill, placement.decode)

    def replay(self) -> None:
        """Emits a whole cached answer."""
        assert self._cached_answer is not None
        self._start()
        if self.push(self._cached_answer.tokens):
            # This version does not find the stop string that the recording version found.
            self._text.finish = FinishReason.STOP

    def resume(self, token_ids: Sequence[int]) -> bool:
        """Continues after tokens that the client has. Returns False if the client only missed the
        end."""
        if not token_ids:
            return True
        finish = self._work.finish_reason(token_ids[-1], len(token_ids))
        known = AnswerDelta("", [], self._index)
        self._splitter.push(self._text.push(list(token_ids), finish), known)
        self._call_ids += [call.id for call in known.tool_calls if call.id]
        if over := self._text.finish is not None:
            self._start()
        return not over

    def recorded(self) -> CachedAnswer:
        """Returns the complete answer, for later replays."""
        assert self._recorded is not None
        accepted, rejected = self.ledger.accepted_tokens, self.ledger.rejected_tokens
        tokens = merge_tokens(self._recorded)._replace(
            guessed=accepted + rejected, accepted=accepted
        )
        return CachedAnswer(tokens, self._call_ids)

    def _start(self, prefill_worker: str = "", decode_worker: str = "") -> None:
        started = pb.Started(
            request_id=self._request.request_id,
            prompt_tokens=len(self._work.prompt_tokens),
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            seed=self._request.sampling.seed,
            n=self._request.n,
        )
        self._emit(started)

    def push(self, tokens: Tokens) -> bool:
        """Emits what the tokens add. Returns True if more tokens are wanted."""
        ids, count = tokens.token_ids, self._text.count
        if self._recorded is not None:
            self._recorded.append(tokens)
        self._measure(len(ids))
        text = self._text.push(ids, tokens.finish)
        over = self._text.finish is not None
        self.ledger.note_text(finished=over)
        count = self._text.count - count
        delta = AnswerDelta("", ids if count == len(ids) else ids[:count], self._index)
        self._splitter.push(text, delta)
        if over:
            self._splitter.flush(delta)
        if delta.tool_calls:
            self._call_ids += [call.id for call in delta.tool_calls if call.id]
        if tokens.logprobs:
            delta.logprobs = self._scored(delta.token_ids, tokens.logprobs[:count])
        if self._cached is None:
            self._cached = tokens.cached_tokens, tokens.fetched_tokens
            delta.prompt_logprobs = self._scored_prompt(tokens)
            delta.replayed = self._cached_answer is not None
            delta.embedding = tokens.embedding
        if tokens.guessed:
            self.ledger.note_guesses(tokens.guessed, min(tokens.accepted, count))
        self._emit(delta)
        return not over

    def finished(self) -> pb.Finished:
        """Returns the event that ends the answer."""
        text = self._text
        assert text.finish is not None
        called = bool(self._call_ids) and text.finish is FinishReason.STOP
        cached, fetched = self._cached or (0, 0)
        return pb.Finished(
            finish_reason=finish_to(FinishReason.TOOL_CALLS if called else text.finish),
            usage=pb.Usage(
                prompt_tokens=len(self._work.prompt_tokens),
                completion_tokens=text.count,
                cached_tokens=cached,
                fetched_tokens=fetched,
                accepted_prediction_tokens=self.ledger.accepted_tokens,
                rejected_prediction_tokens=self.ledger.rejected_tokens,
                response_cache=self.ledger.response_cache,
            ),
            stop=text.stops.hit,
            placements=self._placements,
            index=self._index,
            seed=self._work.sampling.seed,
        )

    def _measure(self, count: int) -> None:
        ledger, before = self.ledger, self.ledger.last
        ledger.note_tokens(count)
        if before and self._work.background:  # a gap may be a pause
            self._times.add_first(count, ledger.last)
        elif before:
            self._times.add(count, (ledger.last - before) / count, ledger.last)
        else:
            self._times.add_first(count, ledger.last)
            self._on_first_token(ledger)

    def _scored_prompt(self, first: Tokens) -> tuple[ScoredToken, ...]:
        """Returns the prompt's log probabilities, which come with the first tokens; the prompt's
        first token has none."""
        if self._request.prompt_logprobs is None:
            return ()
        begin, *rest = self._work.prompt_tokens
        unscored = ScoredToken(TokenScore(begin, self._model.token_bytes(begin), None), ())
        return (unscored, *self._scored(rest, first.prompt_logprobs))

    def _scored(
        self, tokens: Iterable[int], logprobs: Iterable[Logprobs]
    ) -> tuple[ScoredToken, ...]:
        token_bytes = self._model.token_bytes
        return tuple(
            ScoredToken(
                TokenScore(token, token_bytes(token), each.logprob),
                tuple(
                    TokenScore(top, token_bytes(top), logprob)
                    for top, logprob in zip(each.top_token_ids, each.top_logprobs, strict=True)
                ),
            )
            for token, each in zip(tokens, logprobs, strict=True)
        )


def splitter_for(
    form: AnswerFormat, chat: ChatPrompt | None, *, thinking: bool, new_id: Callable[[], str]
) -> Splitter:
    """Returns the splitter for one answer. Without a chat, all text is content."""
    if chat and form.tools is HARMONY:
        return HarmonySplitter(chat.callable_tools, new_id, reasoning=form.reasoning)
    splitter: Splitter = ContentSplitter()
    if chat and chat.tools:
        splitter = ToolCallSplitter(form.tools, chat.callable_tools, new_id)
    if chat and form.reasoning:
        splitter = ReasoningSplitter(
            thinking=thinking, content=splitter, markers=form.reasoning_markers
        )
    return splitter


def _public(placement: Placement) -> pb.Placement:
    forecast = placement.forecast
    return pb.Placement(
        prefill_worker=placement.prefill,
        decode_worker=placement.decode,
        policy=placement.policy.value,
        reason=redact(placement.explanation),
        reason_code=placement.code.value,
        predicted_seconds=forecast.first_token_seconds if forecast else 0.0,
    )

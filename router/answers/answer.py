"""An answer's text, as its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.types import FinishReason, Logprobs
from baton.router.answers.detokenizer import Detokenizer
from baton.router.answers.stop_strings import StopStrings
from baton.router.requests.attempt import Tokens


@dataclass(slots=True)
class TextDelta:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # One a token, where they are asked for.
    logprobs: list[Logprobs] = field(default_factory=list)


class AnswerText:
    """Folds tokens into text; `finish` is set once the answer is over.

    The token that ends an answer counts as one of its tokens but adds no text.
    After a stop string, tokens that came with it are dropped.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self.finish: FinishReason | None = None
        self.stop = ""
        self.count = 0

    def push(self, tokens: Tokens) -> TextDelta:
        """What the new tokens add."""
        if self._stops.idle:
            return self._push_all(tokens)
        delta = TextDelta()
        last = len(tokens.token_ids) - 1
        for index, token in enumerate(tokens.token_ids):
            delta.token_ids.append(token)
            delta.logprobs += tokens.logprobs[index : index + 1]
            self.count += 1
            ends_answer = tokens.finish is FinishReason.STOP and index == last
            if not ends_answer:
                delta.text += self._stops.push(self._detokenizer.push([token]))[0]
            if self._stops.hit:
                self._end(FinishReason.STOP)
                return delta
        if tokens.finish:
            delta.text += self._stops.push(self._detokenizer.flush())[0] + self._stops.flush()
            self._end(tokens.finish)
        return delta

    def _push_all(self, tokens: Tokens) -> TextDelta:
        """Without stop strings, tokens need not be looked at one by one."""
        ends_answer = tokens.finish is FinishReason.STOP
        text = self._detokenizer.push(tokens.token_ids[:-1] if ends_answer else tokens.token_ids)
        self.count += len(tokens.token_ids)
        if tokens.finish:
            text += self._detokenizer.flush()
            self._end(tokens.finish)
        return TextDelta(text, tokens.token_ids, list(tokens.logprobs))

    def _end(self, reason: FinishReason) -> None:
        self.finish = FinishReason.STOP if self._stops.hit else reason
        self.stop = self._stops.hit or ""

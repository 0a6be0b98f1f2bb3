"""Computes which tokens may come next in an answer that must match a grammar.

Grammars are compiled and masks computed in threads beside the engine's: a mask is started when
the token before it is known, and awaited when the next one is sampled. A guide's state depends on
the answer's tokens alone, so another worker can continue it by compiling the grammar and following
the tokens again.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.core.errors import (
    BatonError,
    Exhausted,
    Internal,
    InvalidGrammar,
    InvalidRequest,
    NotServed,
)
from baton.core.generation_defaults import end_tokens
from baton.core.model_store import read_json
from baton.core.tokenizer_files import tokenizer_text
from baton.core.types import Work

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.uint8]

THREADS = 4
KEPT_GRAMMARS = 64
"""Compiled grammars kept for requests with the same structure."""

MASK_SECONDS = 10.0
"""Limit for a step to wait for a mask; the compiler's own limits are far shorter."""

AHEAD_SECONDS = 0.01
"""Limit for guesses to wait for the mask before them; the grammar may still be compiling."""


class Grammars:
    """Guides for one model, whose tokenizer is in `folder`."""

    def __init__(self, folder: Path, vocabulary_size: int) -> None:
        self._folder = folder
        self._vocabulary_size = vocabulary_size
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._loading = threading.Lock()

    def guide(self, work: Work) -> TokenGuide | None:
        """Starts to compile the request's grammar. Returns None without one."""
        if not work.grammar:
            return None
        if work.grammar not in self._compiled:
            self._compiled[work.grammar] = self._threads.submit(self._compile, work.grammar)
        self._compiled.move_to_end(work.grammar)
        if len(self._compiled) > KEPT_GRAMMARS:
            self._compiled.popitem(last=False)
        return TokenGuide(self._threads, self._compiled[work.grammar], work.stop_token_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        with self._loading:
            tokenizers = self._tokenizers
        from llguidance import LLMatcher

        for tokenizer in tokenizers:
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            if not matcher.is_error():
                return matcher
        raise InvalidGrammar(matcher.get_error(), field="grammar")

    @cached_property
    def _tokenizers(self) -> list[LLTokenizer]:
        """One whose tags are text; then, if there are tags, one that has them as names, for Lark
        such as `start: <tool_call> body`."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ModuleNotFoundError:
            raise NotServed("grammars need llguidance, which is not installed") from None
        text, ends = tokenizer_text(self._folder), _end_tokens(self._folder)
        end = ends[0] if ends else None
        try:
            made = LLTokenizer(text, n_vocab=self._vocabulary_size, eos_token=end)
            tags = _tags(text) - {*ends, *made.eos_tokens}
            wrapped = TokenizerWrapper(_PlainText(made, tags))
            plain = LLTokenizer(wrapped, n_vocab=self._vocabulary_size, eos_token=end)
            return [plain, made] if tags else [plain]
        except ValueError as error:
            raise NotServed(f"this model's tokenizer does not support grammars: {error}") from error


class _PlainText:
    """A tokenizer whose tags are text, and which makes no special token of a text: what
    llguidance's TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: LLTokenizer, tags: frozenset[int]) -> None:
        ids = range(tokenizer.vocab_size)
        special = [token for token in ids if tokenizer.is_special_token(token)]
        self.eos_token_id = tokenizer.eos_token
        self.tokens = [tokenizer.decode_bytes([token]) for token in ids]
        self.special_token_ids = [token for token in special if token not in tags]
        self._tokenizer = tokenizer
        marks = sorted({self.tokens[token] for token in self.special_token_ids} - {b""}, key=len)
        self._marks = re.compile(b"|".join(map(re.escape, reversed(marks))) or b"(?!)")

    def __call__(self, text: bytes) -> list[int]:
        found, start = list[int](), 0
        # The tokenizer would find a special token in its text, so such a text is cut.
        while mark := self._marks.search(text, start):
            end = mark.start() + len(mark[0].decode(errors="ignore")[:1].encode() or b"-")
            found += self._tokenizer.tokenize_bytes(text[start:end])
            start = end
        return found + self._tokenizer.tokenize_bytes(text[start:])


class TokenGuide:
    """Follows one answer. Owned by the engine's thread; other threads run its work, in order."""

    def __init__(
        self, threads: ThreadPoolExecutor, compiled: Future[LLMatcher], ends: frozenset[int]
    ) -> None:
        """`ends` are the stop tokens, which are allowed where the grammar accepts."""
        self._threads = threads
        self._ends = ends
        self._matcher: Future[LLMatcher] = threads.submit(lambda: compiled.result().deep_copy())
        self._mask: Future[Mask] | None = None
        self._ahead: Future[list[Mask]] | None = None  # the mask after each guess

    def follow(self, tokens: list[int]) -> None:
        """Appends tokens to the answer."""
        self._mask = self._threads.submit(self._next, self._mask, tokens)

    def look_ahead(self, guesses: list[int]) -> list[int]:
        """Returns the guesses up to the first that the grammar does not allow, and computes the
        masks after them. Returns none if the mask before them is late or has failed; sampling
        raises that error."""
        try:
            assert self._mask is not None
            self._mask.result(AHEAD_SECONDS)
        except (TimeoutError, BatonError):
            return []
        matcher = self._matcher.result()
        kept = guesses[: matcher.validate_tokens(guesses)]
        self._ahead = self._threads.submit(self._masks_after, matcher.deep_copy(), kept)
        return kept

    def mask(self, ahead: int = 0) -> Mask:
        """One number per token: 0 if it may not come next, or not after `ahead` guesses."""
        if self._mask is None or (ahead and self._ahead is None):
            raise Internal("a guide has no mask before it follows tokens")
        try:
            if ahead and self._ahead is not None:
                return self._ahead.result(MASK_SECONDS)[ahead - 1]
            return self._mask.result(MASK_SECONDS)
        except TimeoutError:
            raise Exhausted("the grammar took too long to compute the next mask") from None

    def _next(self, before: Future[Mask] | None, tokens: list[int]) -> Mask:
        matcher = self._matcher.result()
        if before is None:
            _begin(matcher, tokens)
        else:
            # Threads start work in order, so what this waits for has started.
            before.result()
            _consume(matcher, tokens)
        return self._mask_of(matcher)

    def _masks_after(self, matcher: LLMatcher, guesses: list[int]) -> list[Mask]:
        masks = []
        for guess in guesses:
            _consume(matcher, [guess])
            masks.append(self._mask_of(matcher))
        return masks

    def _mask_of(self, matcher: LLMatcher) -> Mask:
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise _fault(matcher.get_error())
        mask = np.unpackbits(packed, bitorder="little")
        if matcher.is_accepting():
            mask[[token for token in self._ends if token < len(mask)]] = 1
        return mask


def _begin(matcher: LLMatcher, tokens: list[int]) -> None:
    """Consumes the answer's first tokens: those of earlier attempts, or of a resumed answer."""
    if tokens and not matcher.consume_tokens(tokens):
        raise InvalidRequest(
            "the answer's tokens do not match its structure", field="resumed_token_ids"
        )


def _consume(matcher: LLMatcher, tokens: list[int]) -> None:
    if tokens and not matcher.consume_tokens(tokens):
        raise _fault(matcher.get_error())


def _fault(error: str) -> BatonError:
    """Translates an error of llguidance. Its first line is the message; the matcher's state
    follows."""
    first = error.partition("\n")[0]
    if "\nStop: NoExtension" in error:
        return InvalidGrammar(
            "the structure allows no token here, not even an end", field="grammar"
        )
    if "TooComplex\n" in error:
        return InvalidGrammar(f"the grammar is too complex: {first}", field="grammar")
    return Internal(f"the answer left its grammar: {first}")


def _tags(tokenizer: str) -> frozenset[int]:
    """The added tokens such as <tool_call> that the model does not call special. llguidance takes
    none of them for text, so no grammar could ask for theirs."""
    added = json.loads(tokenizer).get("added_tokens") or []
    return frozenset(
        token["id"]
        for token in added
        if not token["special"] and token["content"][:1] == "<" and token["content"][-1:] == ">"
    )


def _end_tokens(folder: Path) -> list[int]:
    """Returns the model's end tokens, which are never text."""
    files = ("generation_config.json", "config.json")
    return [token for name in files for token in end_tokens(name, read_json(folder / name))]

"""Converts text to tokens and back, for one model.

Prompts of any kind become token ids, and token ids become text. Calls are thread-safe; a
Detokenizer belongs to one answer. A model without a tokenizer takes token ids and answers with
token ids only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest, PromptTooLong, TokenOutOfRange
from baton.core.page_keys import PageNaming
from baton.core.types import ChatPrompt, Prompt, Request
from baton.router.answers.answer_format import PLAIN, AnswerFormat, answer_format
from baton.router.answers.detokenizer import (
    Detokenizer,
    TokenBytes,
    detokenizer_factory,
    special_ids,
)
from baton.router.prompts.chat_template import ChatTemplates
from baton.router.prompts.text_files import TextFiles


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    tokens: list[int]
    page_keys: list[bytes]  # empty if no worker has a prefix cache
    prediction: list[int]  # of the answer
    thinking: bool  # the prompt ends within the model's reasoning
    template_seconds: float
    tokenize_seconds: float


class Text:
    """A model's tokenizer and chat templates."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_templates: ChatTemplates,
        eos_token_ids: frozenset[int],
        vocabulary_size: int,
        answers: AnswerFormat = PLAIN,
        tokenizer_info: Mapping[str, str | None] | None = None,
    ) -> None:
        self.answers = answers
        self.tokenizer_info = tokenizer_info or {}
        self._tokenizer = tokenizer
        self._chat_templates = chat_templates
        # In characters. Byte-level vocabularies have at least one character for each of a text.
        vocabulary = tokenizer.get_vocab() if tokenizer else {"": 0}
        self._longest_token = max(map(len, vocabulary))
        self._special_ids = special_ids(tokenizer)
        self._grammar_ids = self._special_ids | _tag_ids(tokenizer)
        self._make_detokenizer = detokenizer_factory(tokenizer, self._special_ids)
        markers = {self.special_id(marker) for marker in answers.markers}
        hidden = frozenset(self._special_ids - markers)
        self._make_marking_detokenizer = detokenizer_factory(tokenizer, hidden)
        self._make_full_detokenizer = detokenizer_factory(tokenizer, frozenset())
        self._token_bytes = TokenBytes(tokenizer)
        self.eos_token_ids = eos_token_ids
        self.vocabulary_size = vocabulary_size

    @classmethod
    def load(cls, folder: Path, tools: str = "auto", reasoning: str = "auto") -> Text:
        """Loads a Hugging Face model folder. `tools` and `reasoning` are the configuration's
        router.tool_format and router.reasoning."""
        files = TextFiles(folder)
        tokenizer = files.tokenizer()
        templates = ChatTemplates(files.chat_templates(), files.special_tokens())
        plain, tooled = templates.source or "", templates.source_with_tools or ""
        return cls(
            tokenizer,
            templates,
            files.eos_token_ids(tokenizer),
            files.vocabulary_size(),
            answer_format(tooled, tools, reasoning, plain),
            {**files.special_tokens(), "chat_template": templates.source},
        )

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """True if the model takes chats without tools."""
        return self._chat_templates.source is not None

    def prepare(
        self, request: Request, most_tokens: int, naming: PageNaming | None
    ) -> TokenizedPrompt:
        """Renders and tokenizes a request's prompt, and computes its page keys."""
        began = time.monotonic()
        chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
        text = self.render(chat) if chat else ""
        rendered = time.monotonic()
        tokens = self._request_tokens(request, text, most_tokens)
        adapter = request.adapter.digest if request.adapter else b""
        keys = naming.keys(tokens[:most_tokens], request.cache_salt, adapter) if naming else []
        return TokenizedPrompt(
            tokens,
            keys,
            self._prediction(request.prediction),
            thinking=chat is not None and self.answers.opens_reasoning(text),
            template_seconds=rendered - began,
            tokenize_seconds=time.monotonic() - rendered,
        )

    def _prediction(self, text: str) -> list[int]:
        """Tokenizes a predicted answer. Unpaired surrogates are replaced: they only cause wrong
        guesses."""
        if not text or self._tokenizer is None:
            return []
        whole = text.encode(errors="replace").decode()
        return self._tokenizer.encode(whole, add_special_tokens=False).ids

    def _request_tokens(self, request: Request, rendered: str, most_tokens: int) -> list[int]:
        kept = request.truncate_prompt_tokens
        special = request.add_special_tokens
        if kept is None:
            return self.encode(request.prompt, rendered, most_tokens, add_special_tokens=special)
        tokens = self.encode(request.prompt, rendered, add_special_tokens=special)
        if kept < 0:
            kept = max(1, most_tokens - max(1, request.max_tokens or 1))
        return tokens[max(0, len(tokens) - kept) :]

    def encode(
        self,
        prompt: Prompt,
        rendered: str | None = None,
        most_tokens: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Returns the prompt's token ids. Plain text gets the model's special tokens (such as
        BOS); a chat has those that its template writes; token ids pass unchanged. `rendered` is
        the text of a chat that is already rendered.

        Text that cannot fit into `most_tokens` tokens is refused before it is tokenized.
        """
        match prompt:
            case str():
                return self._tokenize(prompt, most_tokens, add_special_tokens=add_special_tokens)
            case ChatPrompt():
                text = self.render(prompt) if rendered is None else rendered
                return self._tokenize(text, most_tokens, add_special_tokens=False)
            case _:
                return list(prompt)

    def render(self, chat: ChatPrompt) -> str:
        """Renders a chat as the text that the model sees."""
        return self._chat_templates.render(chat)

    def decode(
        self, ids: Sequence[int], keep_special: bool = False, field: str = "token_ids"
    ) -> str:
        """Returns the text of complete `ids`, without those that the tokenizer does not know; none
        without a tokenizer. Raises TokenOutOfRange for `field`."""
        size = self.vocabulary_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise TokenOutOfRange(
                f"token id {max(ids)} is outside the vocabulary of {size}", field=field
            )
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a single token, special or not."""
        return self._token_bytes[token_id]

    def special_id(self, token: str) -> int | None:
        """Returns the id of a token that a grammar must name; None for any other text."""
        found = self._tokenizer.token_to_id(token) if self._tokenizer else None
        return found if found in self._grammar_ids else None

    def detokenizer(self, *, markers: bool = False, skip_special: bool = True) -> Detokenizer:
        """Returns a detokenizer for one answer. Its text has no special tokens, or with `markers`
        only those of reasoning and tool calls, or without `skip_special` all of them."""
        if not skip_special:
            return self._make_full_detokenizer()
        return self._make_marking_detokenizer() if markers else self._make_detokenizer()

    def _tokenize(
        self, text: str, most_tokens: int | None, *, add_special_tokens: bool
    ) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send token ids", field="prompt")
        if most_tokens is not None and len(text) > most_tokens * self._longest_token:
            raise PromptTooLong(
                f"the prompt has {len(text):,} characters;"
                f" the context holds {most_tokens:,} tokens",
                field="prompt",
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the prompt holds half a character at {error.start}", field="prompt"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _tag_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Added tokens such as <tool_call> and </think>, which many models do not call special:
    llguidance does."""
    added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
    texts = {token_id: token.content for token_id, token in added.items()}
    return frozenset(
        token_id for token_id, text in texts.items() if text[:1] == "<" and text[-1:] == ">"
    )

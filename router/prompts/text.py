"""Everything between text and tokens, for one model.

Prompts of any kind become token ids, token ids become text. Calls are safe
from several threads at once; a Detokenizer belongs to one answer. A model
without a tokenizer takes token ids and answers with them, without text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest, PromptTooLong, TokenOutOfRange
from baton.core.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from baton.router.answers.answer_format import PLAIN, AnswerFormat, answer_format
from baton.router.answers.detokenizer import (
    Detokenizer,
    EveryTokensBytes,
    NoText,
    detokenizer_factory,
    special_ids,
)
from baton.router.prompts.chat_template import ChatTemplate
from baton.router.prompts.text_files import TextFiles


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as its template writes it, special tokens included."""

    text: str


class Text:
    """A model's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
        vocabulary_size: int,
        answers: AnswerFormat = PLAIN,
    ) -> None:
        self.answers = answers
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        # In characters; a byte-level vocabulary writes at least one a character.
        vocabulary = tokenizer.get_vocab() if tokenizer else {"": 0}
        self._longest_token = max(map(len, vocabulary))
        self._special_ids = special_ids(tokenizer) if tokenizer else frozenset[int]()
        self._make_detokenizer = self._factory(frozenset())
        marks = {self.special_id(mark) for mark in answers.marks} - {None}
        self._make_marking_detokenizer = self._factory(frozenset(filter(None, marks)))
        self._token_bytes = EveryTokensBytes(tokenizer)
        self.eos_token_ids = eos_token_ids
        self.vocabulary_size = vocabulary_size

    def _factory(self, shown: frozenset[int]) -> Callable[[], Detokenizer]:
        if self._tokenizer is None:
            return NoText
        return detokenizer_factory(self._tokenizer, self._special_ids - shown)

    @classmethod
    def load(cls, folder: Path, tools: str = "auto", thoughts: str = "auto") -> Text:
        """From a Hugging Face model folder. `tools` and `thoughts` are how the model writes these,
        where its template does not say: router.tool_format and router.reasoning."""
        files = TextFiles(folder)
        tokenizer = files.tokenizer()
        source = files.chat_template()
        return cls(
            tokenizer,
            None if source is None else ChatTemplate(source, files.special_tokens()),
            files.eos_token_ids(tokenizer),
            files.vocabulary_size(),
            answer_format(source or "", tools, thoughts),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, prompt: Prompt | Rendered, most_tokens: int | None = None) -> list[int]:
        """The prompt's token ids. Plain text gets the model's special tokens (such as BOS);
        a chat has those that its template writes; token ids pass as they are.

        Text that cannot fit `most_tokens` tokens, however it is cut, is refused
        before the time is spent on cutting it.
        """
        match prompt:
            case TextPrompt(text):
                return self._tokenize(text, most_tokens, add_special_tokens=True)
            case ChatPrompt():
                return self.encode(Rendered(self.render(prompt)), most_tokens)
            case Rendered(text):
                return self._tokenize(text, most_tokens, add_special_tokens=False)
            case TokenPrompt(token_ids):
                return list(token_ids)

    def render(self, chat: ChatPrompt) -> str:
        """The chat as the text that the model sees."""
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; send plain text", field="chat")
        return self._chat_template.render(chat.messages, chat.tools)

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """The text of whole `ids`. Ids that the tokenizer does not know add nothing."""
        if self._tokenizer is None:
            return ""
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special)
        except OverflowError as error:
            raise TokenOutOfRange(
                "token ids must be from 0 to 2**32 - 1", field="token_ids"
            ) from error

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for by itself, a special one too."""
        return self._token_bytes[token_id]

    def special_id(self, token: str) -> int | None:
        """The id of what is one special token; None for anything else."""
        found = self._tokenizer.token_to_id(token) if self._tokenizer else None
        return found if found in self._special_ids else None

    def detokenizer(self, *, marks: bool = False) -> Detokenizer:
        """For one answer; its text comes without special tokens, but for the marks of thoughts
        and tool calls where they are wanted."""
        return self._make_marking_detokenizer() if marks else self._make_detokenizer()

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

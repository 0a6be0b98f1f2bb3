"""/tokenize and /detokenize: what their bodies hold."""

from __future__ import annotations

from baton.core.bounds import MAX_PROMPT_TOKENS
from baton.core.errors import InvalidRequest
from baton.core.types import Prompt, TextPrompt
from baton.router.edges.http.chat import read_messages
from baton.router.edges.http.completions import MAX_PROMPT_CHARACTERS
from baton.router.edges.http.fields import Flag, Json, TokenIds, Unserved, as_text
from baton.router.edges.http.tools import read_tools

TOKENS = TokenIds("tokens", "The ids to turn into text.", MAX_PROMPT_TOKENS)
KEEP_SPECIAL = Flag("keep_special_tokens", "Leave special tokens in the text.")
ADD_SPECIAL = Unserved("add_special_tokens", "prompts without special tokens", (True,))


def read_prompt(body: Json) -> Prompt:
    """What is to be tokenized: `messages`, or else `prompt`."""
    ADD_SPECIAL.check(body)
    prompt = body.get("prompt")
    text = None if prompt is None else as_text(prompt, "prompt", MAX_PROMPT_CHARACTERS)
    if body.get("messages") is not None:
        return read_tools(body, read_messages(body["messages"]))
    if text is None:
        raise InvalidRequest("a prompt is missing: set prompt or messages", field="prompt")
    return TextPrompt(text)

"""From a prompt of any kind to tokens, in a text thread."""

from __future__ import annotations

import time
from dataclasses import dataclass

from baton.core.page_keys import page_keys, salted_root
from baton.core.types import ChatPrompt, Prompt, Request
from baton.router.prompts.text import Rendered, Text
from baton.router.workers.membership import CacheNames


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as tokens, the names of its pages where workers have caches, and what it took."""

    tokens: list[int]
    page_keys: list[bytes]
    template_seconds: float
    tokenize_seconds: float
    # Whether the prompt ends within the model's thoughts.
    opened: bool


def read_prompt(
    text: Text, request: Request, most_tokens: int, names: CacheNames | None
) -> ReadPrompt:
    began = time.monotonic()
    prompt: Prompt | Rendered = request.prompt
    if isinstance(prompt, ChatPrompt):
        prompt = Rendered(text.render(prompt))
    opened = isinstance(prompt, Rendered) and text.answers.is_open(prompt.text)
    rendered = time.monotonic()
    tokens = text.encode(prompt, most_tokens)
    keys: list[bytes] = []
    if names is not None:
        parent = salted_root(names.root, request.cache_salt)
        keys = page_keys(parent, tokens[:most_tokens], names.page_size)
    return ReadPrompt(tokens, keys, rendered - began, time.monotonic() - rendered, opened)

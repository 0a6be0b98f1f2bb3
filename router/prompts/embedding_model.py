"""The embedding model: a small encoder beside the served model, which embeds texts and no more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from baton.core.encoder_config import EncoderConfig
from baton.core.errors import InvalidRequest
from baton.core.types import Pooling, Request
from baton.router.prompts.text import Text


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    name: str
    text: Text
    max_tokens: int  # of an input

    @classmethod
    def load(cls, model: str) -> Self:
        folder = Path(model).expanduser().absolute()
        max_tokens = EncoderConfig.read(folder).max_tokens
        return cls(folder.name, Text.load(folder), max_tokens)

    def addressed(self, request: Request) -> Request:
        """The request as this model's; raises why it cannot be."""
        if request.pooling is None:
            raise InvalidRequest(f"the model {self.name!r} embeds and cannot answer", field="model")
        if request.pooling is not Pooling.ENCODER:
            raise InvalidRequest(f"the model {self.name!r} pools in its own way", field="pooling")
        if request.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                f"inputs of the model {self.name!r} are not truncated",
                field="truncate_prompt_tokens",
            )
        return replace(request, model=self.name)

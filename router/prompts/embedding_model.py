"""The embedding model: a small encoder beside the served model, which only embeds texts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from baton.core.encoder_config import EncoderConfig
from baton.core.errors import InvalidRequest
from baton.core.types import Pooling, Request
from baton.router.prompts.text import Text

_DECISIVE_FILES = {".json", ".safetensors", ".model", ".txt"}
"""Suffixes of the files that decide a vector: configurations, weights, tokenizers."""


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    name: str
    text: Text
    max_tokens: int  # of an input
    folder: Path

    @classmethod
    def load(cls, model: str) -> Self:
        folder = Path(model).expanduser().absolute()
        max_tokens = EncoderConfig.read(folder).max_tokens
        return cls(folder.name, Text.load(folder), max_tokens, folder)

    def digest(self) -> bytes:
        """Reads and digests all files that decide a vector."""
        digest = hashlib.blake2b(digest_size=32, person=b"baton-embedder")
        files = [*self.folder.iterdir(), *self.folder.glob("*_Pooling/*")]
        for file in sorted(each for each in files if each.suffix in _DECISIVE_FILES):
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").digest()
            digest.update(str(file.relative_to(self.folder)).encode() + b"\0" + content)
        return digest.digest()

    def addressed(self, request: Request) -> Request:
        """Returns the request, addressed to this model. Raises InvalidRequest for what it cannot
        do."""
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

"""/v1/embeddings: its body and its answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic_core import to_json
from typing_extensions import TypedDict

from baton.core.generation_defaults import GenerationDefaults
from baton.core.types import Pooling, Request, Sampling
from baton.router.answers.answer_events import AnswerEvent, EmbeddedInputs, Vector
from baton.router.edges.http.answer_renderer import AnswerRenderer
from baton.router.edges.http.completion_request import Prompts
from baton.router.edges.http.generation_request import PromptRequest, ShortText
from baton.router.edges.http.request_model import Unserved, about


class EmbeddingsRequest(PromptRequest):
    input: Prompts
    encoding_format: Literal["float", "base64"] = about("base64: float32, little-endian.", "float")
    dimensions: int | None = about("Keep only this many of each vector.", ge=1, le=2**32 - 1)
    pooling: Literal["last", "mean"] | None = about(
        "The hidden state of the last token, or the mean of all. Absent: last, or the embedding"
        " model's own pooling."
    )
    normalize: bool = about("Divide each vector by its length.", True)
    add_special_tokens: bool = about("Add the model's special tokens to a text.", True)
    user: ShortText = about("Ignored.", "")

    unserved: ClassVar[dict[str, Unserved]] = {"stream": Unserved("streamed embeddings", (False,))}

    def requests(self, request_id: str, defaults: GenerationDefaults) -> tuple[Request, ...]:
        pooling = Pooling[self.pooling.upper()] if self.pooling else Pooling.ENCODER
        return tuple(
            Request(
                request_id,
                prompt,
                Sampling(),
                max_tokens=0,
                pooling=pooling,
                cache_salt=self.cache_salt,
                priority=self._priority(),
                add_special_tokens=self.add_special_tokens,
                truncate_prompt_tokens=self.truncate_prompt_tokens,
            )
            for prompt in self.input
        )


class EmbeddingObject(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingsUsage


class EmbeddingsRenderer(AnswerRenderer[EmbeddingsRequest]):
    body_model = EmbeddingsRequest
    prompt_field = "input"
    id_prefix = "embd-"

    def __init__(self, body: EmbeddingsRequest, requests: Sequence[Request]) -> None:
        super().__init__(body, requests)
        self._embedded = EmbeddedInputs(len(requests), body.dimensions, normalized=body.normalize)

    def collect(self, event: AnswerEvent) -> None:
        self._embedded.collect(event)

    def whole(self) -> bytes:
        encoded = _base64 if self._body.encoding_format == "base64" else _numbers
        tokens = self._embedded.prompt_tokens
        answer: EmbeddingsAnswer = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encoded(vector)}
                for index, vector in enumerate(self._embedded.vectors())
            ],
            "model": self.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return to_json(answer)  # much faster than `encode` for many numbers


def _numbers(vector: Vector) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()

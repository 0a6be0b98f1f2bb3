"""Renders the events of a call's answers as one object or as server-sent events.

This is the base for all APIs. Each API has a subclass, the only code that knows its JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from baton.core.types import Request
from baton.router.answers.answer_events import AnswerEvent
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.edges.http.answer_types import ResponseCacheUsage
from baton.router.edges.http.generation_request import PromptRequest
from baton.router.observe.ledger import rounded
from baton.router.requests.serving import Serving
from baton.v1 import inference_pb2 as pb
from baton.v1 import timing_pb2

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Body = TypeVar("Body", bound=PromptRequest)


class AnswerRenderer(Generic[Body]):
    """Renders the answers of one call."""

    body_model: type[Body]
    prompt_field: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, body: Body, requests: Sequence[Request]) -> None:
        self.id = requests[0].request_id
        self.model = requests[0].model
        self.created = int(time.time())
        self.answers = sum(request.n for request in requests)
        # Over all answers; each prompt counts once.
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.accepted_tokens = self.rejected_tokens = 0  # of the guessed ones
        self._replayed: list[timing_pb2.ResponseCache] = []
        self._body = body
        self._n = requests[0].n

    async def prepare(self, serving: Serving) -> None:
        """Called before the first event."""

    def began(self, events: ClientBuffer) -> None:
        """Receives the call's buffer; closing it ends the answers early."""

    def collect(self, event: AnswerEvent) -> None:
        """Adds an event to `whole`."""
        raise NotImplementedError

    def whole(self) -> bytes:
        raise NotImplementedError

    def chunk(self, event: AnswerEvent) -> bytes:
        """The bytes that an event adds to a stream; may be empty."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """The last bytes of a stream."""
        raise NotImplementedError

    def failure(self, body: bytes) -> bytes:
        """The last bytes of a stream that ends with an error; `body` is the error's."""
        return b"event: error\ndata: " + body + b"\n\n"

    def _count(self, event: AnswerEvent) -> None:
        if isinstance(event, pb.Started):
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, pb.Finished):
            self.completion_tokens += event.usage.completion_tokens
            self.accepted_tokens += event.usage.accepted_prediction_tokens
            self.rejected_tokens += event.usage.rejected_prediction_tokens
            if event.index % self._n == 0:
                self.cached_tokens += event.usage.cached_tokens
            if event.usage.HasField("response_cache"):
                self._replayed.append(event.usage.response_cache)

    @property
    def response_cache(self) -> ResponseCacheUsage | None:
        """The greatest age and lowest similarity, if all answers came from the response cache."""
        if len(self._replayed) < self.answers:
            return None
        age = round(max(each.age_seconds for each in self._replayed), 3)
        similar = [each.similarity for each in self._replayed if each.HasField("similarity")]
        if not similar:
            return {"kind": "exact", "age_seconds": age}
        found: ResponseCacheUsage = {"kind": "semantic", "age_seconds": age}
        found["similarity"] = rounded(min(similar))
        if all(each.verified for each in self._replayed):
            found["verified"] = True
        return found


def encode(content: object) -> bytes:
    return _ENCODER.encode(content).encode()

"""Embeddings at the edges: each input of a call is a request, whose answer is a vector."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from baton.core.errors import InvalidRequest, Unavailable
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent
from baton.v1 import inference_pb2 as pb

MAX_INPUTS = 128

Vector = NDArray[numpy.float32]


class EmbeddedInputs:
    """The vectors of a call's inputs, from the events of their answers."""

    def __init__(self, inputs: int, dimensions: int | None, *, normalized: bool) -> None:
        """`dimensions` are the first ones, to which vectors are cut; None: all."""
        self._inputs = inputs
        self._dimensions = dimensions
        self._normalized = normalized
        self._found: dict[int, Vector] = {}
        self.prompt_tokens = 0  # of all inputs

    def collect(self, event: AnswerEvent) -> None:
        if isinstance(event, pb.Started):
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, AnswerDelta) and event.embedding:
            self._found[event.index] = numpy.frombuffer(event.embedding, "<f4")

    def vectors(self) -> list[Vector]:
        """One an input, in their order."""
        if len(self._found) < self._inputs:
            raise Unavailable("a worker of another version returned no embedding")
        return [self._shape(self._found[index]) for index in range(self._inputs)]

    def _shape(self, vector: Vector) -> Vector:
        size = self._dimensions
        if size is not None and not 1 <= size <= len(vector):
            raise InvalidRequest(
                f"dimensions must be 1 to {len(vector)}, not {size}", field="dimensions"
            )
        cut = vector[:size]
        length = numpy.linalg.norm(cut) if self._normalized else 0.0
        return cut / length if length else cut

"""Renders an answer as a sequence of blocks: reasoning, text, and one for each tool call.

The messages and responses APIs share this and differ in the JSON of a block's events:

    delta ─▶ parts ─▶ blocks ─▶ opened, added to, closed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from baton.core.types import Request
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent, ToolCallDelta
from baton.router.edges.http.answer_renderer import AnswerRenderer, encode
from baton.router.edges.http.generation_request import GenerationRequest
from baton.v1 import inference_pb2 as pb

Body = TypeVar("Body", bound=GenerationRequest)
BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    index: int
    kind: BlockKind
    call: ToolCallDelta  # the call's first delta, with its id and name
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a tool call, its arguments."""
        return "".join(self.pieces)


_NO_CALL = ToolCallDelta(0)


class BlockRenderer(AnswerRenderer[Body]):
    """Subclasses render `whole`, the events that begin and end a stream, and those of a block."""

    def __init__(self, body: Body, requests: Sequence[Request]) -> None:
        super().__init__(body, requests)
        self._blocks: list[Block] = []
        self._finished: pb.Finished | None = None
        self._begun = False
        self.reasoning_tokens = 0

    def _begin(self) -> Iterator[bytes]:
        raise NotImplementedError

    def _open(self, block: Block) -> Iterator[bytes]:
        raise NotImplementedError

    def _add(self, block: Block, text: str) -> bytes:
        raise NotImplementedError

    def _close(self, block: Block) -> Iterator[bytes]:
        raise NotImplementedError

    def _end(self) -> Iterator[bytes]:
        raise NotImplementedError

    def collect(self, event: AnswerEvent) -> None:
        self._count(event)
        if isinstance(event, pb.Finished):
            self._finished = event
        elif isinstance(event, AnswerDelta):
            for _ in self._add_to_blocks(event):
                pass

    def chunk(self, event: AnswerEvent) -> bytes:
        if not isinstance(event, AnswerDelta):
            self.collect(event)
            return b""
        return b"".join(self._changes(event))

    def ending(self) -> bytes:
        return b"".join((*self._beginning(), *self._closing(self._blocks), *self._end()))

    def _changes(self, delta: AnswerDelta) -> Iterator[bytes]:
        yield from self._beginning()
        for block, text in self._add_to_blocks(delta):
            if len(block.pieces) == 1:
                yield from self._closing(self._blocks[: block.index])
                yield from self._open(block)
            if text:
                yield self._add(block, text)

    def _beginning(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield from self._begin()

    def _closing(self, blocks: Sequence[Block]) -> Iterator[bytes]:
        if blocks:
            yield from self._close(blocks[-1])

    def _add_to_blocks(self, delta: AnswerDelta) -> Iterator[tuple[Block, str]]:
        """Adds each part of a delta to its block and yields both. A new block has one piece."""
        if delta.reasoning and not delta.text:
            self.reasoning_tokens += len(delta.token_ids)
        for kind, call, text in _parts(delta):
            block = self._blocks[-1] if self._blocks else None
            if block is None or (block.kind, block.call.index) != (kind, call.index):
                block = Block(len(self._blocks), kind, call)
                self._blocks.append(block)
            block.pieces.append(text)
            yield block, text


def _parts(delta: AnswerDelta) -> Iterator[tuple[BlockKind, ToolCallDelta, str]]:
    if delta.reasoning:
        yield "reasoning", _NO_CALL, delta.reasoning
    if delta.text:
        yield "text", _NO_CALL, delta.text
    for call in delta.tool_calls:
        yield "call", call, call.arguments


def server_event(name: str, content: dict[str, object]) -> bytes:
    """Encodes a server-sent event, with its type in the data too."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **content}))

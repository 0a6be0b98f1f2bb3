"""Turns a plan into one batch of tensors, runs it, and samples.

What the layers share (positions, page indices, masks) is made here, once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.flight import Flight, Landed
from engine.kept_pages import KeptPages
from engine.model import Batch, Chunk, Model
from engine.rope import inverse_frequencies, rotations
from engine.sampler import Sampler
from engine.sequence import Piece, Plan, Sequence
from kernels.attention import ChunkReads, DecodeReads, visibility
from kernels.cache import layer_caches, page_rows, token_rows


class Runner:
    """Runs plans of `model` over the paged memory `kv` [page, layer, 2, token, kv_head, dim]."""

    def __init__(self, model: Model, kv: Tensor) -> None:
        shape = model.architecture
        self._model = model
        self._caches = layer_caches(kv)
        self._layers = shape.layers
        self._page_size = kv.shape[3]
        self._dtype = kv.dtype
        self._device = kv.device
        self._windows = sorted(set(shape.windows), key=lambda window: window or 0)
        self._frequencies = inverse_frequencies(shape.rope, shape.head_dim).to(kv.device)
        self._attention_factor = shape.rope.attention_factor
        self._sampler = Sampler(shape.vocabulary_size)
        self._kept: KeptPages | None = None
        if self._windows == [None]:
            self._kept = KeptPages(kv[0, :, :, 0].nbytes, self._page_size)

    def launch(self, plan: Plan) -> Flight:
        """Runs the plan. On a CPU there is nothing to run beside it."""
        return Landed(list(self.run(plan)))

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[int | None]:
        """One forward for all pieces; the next token of each that samples."""
        for piece in plan:
            piece.check(self._page_size)
        # Single tokens first: they are attended together.
        order = sorted(range(len(plan)), key=lambda index: plan[index].count > 1)
        pieces = [plan[index] for index in order]
        logits = self._model.forward(self._batch(pieces), self._caches)
        sampling = [index for index in order if plan[index].samples]
        answers: list[int | None] = [None] * len(plan)
        if sampling:
            tokens = self._sampler.sample(logits, [plan[index].sequence for index in sampling])
            for index, token in zip(sampling, tokens, strict=True):
                answers[index] = token
        for piece in plan:
            piece.sequence.computed += piece.count
        return answers

    def _batch(self, pieces: list[Piece]) -> Batch:
        decoding = sum(piece.count == 1 for piece in pieces)
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        samples: list[int] = []
        for piece in pieces:
            sequence, start = piece.sequence, piece.sequence.computed
            end = start + piece.count
            tokens += sequence.tokens[start:end]
            positions += range(start, end)
            held = sequence.lease.pages
            pages += [held[position // self._page_size] for position in range(start, end)]
            if piece.samples:
                samples.append(len(tokens) - 1)
        position = self._tensor(positions)
        return Batch(
            tokens=self._tensor(tokens),
            rotation=rotations(position, self._frequencies, self._attention_factor),
            writes=token_rows(
                self._tensor(pages), position % self._page_size, self._layers, self._page_size
            ),
            decoding=decoding,
            decode_reads=self._by_window_decode(pieces[:decoding], sampling=bool(samples)),
            chunks=self._chunks(pieces[decoding:], decoding),
            samples=self._tensor(samples),
        )

    def _by_window_decode(
        self, pieces: list[Piece], *, sampling: bool
    ) -> dict[int | None, DecodeReads]:
        if not pieces:
            return {}
        # A step that samples nothing does not attend in its last layer, so it keeps nothing.
        kept = self._kept if sampling else None
        if kept is not None and (reads := self._kept_reads(kept, pieces)):
            return {None: reads}
        return {window: self._decode_reads(pieces, window) for window in self._windows}

    def _kept_reads(self, kept: KeptPages, pieces: list[Piece]) -> DecodeReads | None:
        """As `_decode_reads`, over pages that stay gathered; None when they would be too many."""
        sequences = [piece.sequence for piece in pieces]
        follows = kept.follows(sequences)
        last = self._tensor([sequence.computed for sequence in sequences])
        seen = int(last.max()) + 1
        longest = -(-seen // self._page_size)
        if not follows and not kept.start(longest, self._layers):
            return None
        mask = None
        if len(pieces) > 1:
            keys = torch.arange(seen, device=self._device)
            mask = visibility(last.view(-1, 1, 1, 1), keys, None, self._dtype)
        if follows:
            capacity = kept.pages * self._page_size
            keys_at = torch.arange(len(pieces), device=self._device) * capacity + last
            spots = torch.stack((keys_at, keys_at + len(pieces) * capacity), dim=1)
            return DecodeReads(None, slice(seen), mask, kept.layers, spots)
        pages = [page for sequence in sequences for page in _padded(sequence, kept.pages)]
        rows = page_rows(self._tensor(pages), self._layers)
        return DecodeReads(rows, slice(seen), mask, kept.layers)

    def _chunks(self, pieces: list[Piece], row: int) -> list[Chunk]:
        chunks = []
        for piece in pieces:
            reads = {window: self._chunk_reads(piece, window) for window in self._windows}
            chunks.append(Chunk(row, row + piece.count, reads))
            row += piece.count
        return chunks

    def _decode_reads(self, pieces: list[Piece], window: int | None) -> DecodeReads:
        """The pages that hold what each query sees; short lists repeat their last page."""
        size = self._page_size
        last = [piece.sequence.computed for piece in pieces]
        first = [_first_visible(position, window) for position in last]
        spans = [
            piece.sequence.lease.pages[start // size : end // size + 1]
            for piece, start, end in zip(pieces, first, last, strict=True)
        ]
        width = max(map(len, spans))
        pages = [page for span in spans for page in span + span[-1:] * (width - len(span))]
        rows = page_rows(self._tensor(pages), self._layers)
        if len(pieces) == 1:
            skipped = first[0] // size * size
            return DecodeReads(rows, slice(first[0] - skipped, last[0] + 1 - skipped), None)
        starts = self._tensor([start // size * size for start in first])
        keys = starts.view(-1, 1, 1, 1) + torch.arange(width * size, device=self._device)
        queries = self._tensor(last).view(-1, 1, 1, 1)
        mask = visibility(queries, keys, window, self._dtype)
        return DecodeReads(rows, slice(None), mask)

    def _chunk_reads(self, piece: Piece, window: int | None) -> ChunkReads:
        """The pages that hold what any of the chunk's queries sees."""
        size, start = self._page_size, piece.sequence.computed
        end = start + piece.count
        masked = window is not None and window < end
        if start == 0 and not masked:
            return ChunkReads(None, end, None)
        first_page = _first_visible(start, window) // size
        pages = piece.sequence.lease.pages[first_page : (end - 1) // size + 1]
        rows = page_rows(self._tensor(pages), self._layers)
        if not masked:
            return ChunkReads(rows, end, None)
        keys = torch.arange(first_page * size, end, device=self._device)
        queries = torch.arange(start, end, device=self._device).unsqueeze(1)
        return ChunkReads(rows, len(keys), visibility(queries, keys, window, self._dtype))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _padded(sequence: Sequence, count: int) -> list[int]:
    """`count` of a sequence's pages; the last one again for those it does not have."""
    pages = sequence.lease.pages[:count]
    return pages + pages[-1:] * (count - len(pages))


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)

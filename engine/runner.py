"""Turns a plan into one batch of tensors, runs it, and samples.

What the layers share (positions, page indices, masks) is made here, once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.flight import Flight, Landed, Outcome
from engine.logprobs import score
from engine.model import Batch, Chunk, Model
from engine.prompt_logprobs import Wanted, score_prompts, wanted_rows
from engine.rope import inverse_frequencies, rotations
from engine.sampler import Sampler
from engine.sequence import Piece, Plan
from kernels.attention import (
    ChunkReads,
    DecodeReads,
    prepare_decode_attention,
    visibility,
)
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
        model.pack()
        prepare_decode_attention(shape.heads, self._caches[0])

    def launch(self, plan: Plan) -> Flight:
        """Runs the plan. On a CPU there is nothing to run beside it."""
        return Landed(self.run(plan))

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Outcome]:
        """One forward for all pieces; the next token of each that samples."""
        for piece in plan:
            piece.check(self._page_size)
        # Single tokens first: they are attended together.
        order = sorted(range(len(plan)), key=lambda index: plan[index].count > 1)
        pieces = [plan[index] for index in order]
        wanted = wanted_rows(pieces)
        hidden = self._model.forward(self._batch(pieces, wanted), self._caches)
        self._score_prompts(hidden, wanted)
        sampling = [index for index in order if plan[index].samples]
        answers: list[Outcome] = [None] * len(plan)
        if sampling:
            if len(sampling) < len(wanted):
                hidden = hidden[[place for place, each in enumerate(wanted) if each.samples]]
            logits = self._model.logits(hidden)
            sequences = [plan[index].sequence for index in sampling]
            tokens = self._sampler.sample(logits, sequences)
            for index, token in zip(sampling, tokens, strict=True):
                answers[index] = token
            for scores in score(logits[:, : self._sampler.vocabulary_size], tokens, sequences):
                for row, scored in scores.read():
                    answers[sampling[row]] = scored
        for piece in plan:
            piece.sequence.computed += piece.count
        return answers

    def _score_prompts(self, hidden: Tensor, wanted: list[Wanted]) -> None:
        places = [place for place, each in enumerate(wanted) if not each.samples]

        def logits_of(part: slice) -> Tensor:
            return self._model.logits(hidden[places[part]])[:, : self._sampler.vocabulary_size]

        for scores in score_prompts([wanted[place] for place in places], logits_of):
            scores.keep()

    def _batch(self, pieces: list[Piece], wanted: list[Wanted]) -> Batch:
        decoding = sum(piece.count == 1 for piece in pieces)
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        for piece in pieces:
            sequence, start = piece.sequence, piece.sequence.computed
            end = start + piece.count
            tokens += sequence.tokens[start:end]
            positions += range(start, end)
            held = sequence.lease.pages
            pages += [held[position // self._page_size] for position in range(start, end)]
        position = self._tensor(positions)
        decode_reads = self._by_window(pieces[:decoding])
        return Batch(
            tokens=self._tensor(tokens),
            rotation=rotations(position, self._frequencies, self._attention_factor),
            writes=token_rows(
                self._tensor(pages), position % self._page_size, self._layers, self._page_size
            ),
            decoding=decoding,
            decode_reads=decode_reads,
            chunks=self._chunks(pieces[decoding:], decoding),
            samples=self._tensor([each.row for each in wanted]),
            sample_reads=self._sample_reads(pieces, wanted, decode_reads),
        )

    def _by_window(self, decoding: list[Piece]) -> dict[int | None, DecodeReads]:
        if not decoding:
            return {}
        last = [piece.sequence.computed for piece in decoding]
        return {window: self._decode_reads(decoding, last, window) for window in self._windows}

    def _sample_reads(
        self,
        pieces: list[Piece],
        wanted: list[Wanted],
        decode_reads: dict[int | None, DecodeReads],
    ) -> DecodeReads | None:
        """What the rows whose logits are wanted read in the last layer, each by itself."""
        window = self._model.layers[-1].window
        if decode_reads and all(piece.count == 1 and piece.samples for piece in pieces):
            return decode_reads[window]
        if not wanted:
            return None
        positions = [each.position for each in wanted]
        return self._decode_reads([each.piece for each in wanted], positions, window)

    def _chunks(self, pieces: list[Piece], row: int) -> list[Chunk]:
        chunks = []
        for piece in pieces:
            reads = {window: self._chunk_reads(piece, window) for window in self._windows}
            chunks.append(Chunk(row, row + piece.count, reads))
            row += piece.count
        return chunks

    def _decode_reads(
        self, pieces: list[Piece], last: list[int], window: int | None
    ) -> DecodeReads:
        """The pages that hold what the query at each of the positions `last` sees."""
        size = self._page_size
        first = [_first_visible(position, window) for position in last]
        spans = [
            piece.sequence.lease.pages[start // size : end // size + 1]
            for piece, start, end in zip(pieces, first, last, strict=True)
        ]
        width = max(map(len, spans))
        pages = [page for span in spans for page in span + span[-1:] * (width - len(span))]
        ends = [end + 1 - start // size * size for start, end in zip(first, last, strict=True)]
        return DecodeReads(
            tables=self._tensor(pages).view(len(pieces), width),
            first=self._tensor([start % size for start in first]),
            end=self._tensor(ends),
            longest=max(ends),
        )

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


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)

"""Turns a plan into one batch of tensors, runs it, and samples.

What the layers share (positions, page indices, masks) is made here, once a step.
Where several ranks run the model, rank 0 runs plans and the others follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.logprobs import Wanted, score, score_prompts, wanted_rows
from baton.engine.model import ChunkRows, Model, StepBatch
from baton.engine.rope import inverse_frequencies, rotations
from baton.engine.sampler import Sampler
from baton.engine.step import (
    ChunkInputs,
    FinishedStep,
    InFlightStep,
    Outcome,
    Plan,
    decode_inputs,
    encode_inputs,
)
from baton.engine.tensor_parallel import Group
from baton.kernels.attention import (
    ChunkReads,
    DecodeReads,
    prepare_decode_attention,
    visibility,
)
from baton.kernels.cache import layer_caches, page_rows, token_rows


class Runner:
    """Runs plans of `model` over the paged memory `kv` [page, layer, 2, token, kv_head, dim].

    In a group both are this rank's part.
    """

    def __init__(self, model: Model, kv: Tensor, group: Group | None = None) -> None:
        shape = model.architecture
        self._model = model
        self._group = group
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

    def launch(self, plan: Plan) -> InFlightStep:
        """Runs the plan. On a CPU there is nothing to run beside it."""
        return FinishedStep(self.run(plan))

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Outcome]:
        """One forward for all pieces; the next token of each that samples."""
        for piece in plan:
            piece.check(self._page_size)
        # Single tokens first: they are attended together.
        order = sorted(range(len(plan)), key=lambda index: plan[index].count > 1)
        pieces = [plan[index] for index in order]
        spans = [piece.span(self._page_size) for piece in pieces]
        if self._group:
            self._group.broadcast(encode_inputs(spans))
        hidden = self._forward(spans)
        wanted = wanted_rows(pieces)
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

    @torch.inference_mode()
    def follow(self, step: bytes) -> None:
        """Runs this rank's part of a step that rank 0 runs."""
        self._forward(decode_inputs(step))

    def _forward(self, spans: list[ChunkInputs]) -> Tensor:
        """What the last layer leaves of the rows whose logits are wanted, [n, hidden]. On rank 0
        it returns when all ranks have written."""
        hidden = self._model.forward(self._batch(spans), self._caches)
        if self._group and not len(hidden):
            self._group.wait()  # no sum follows the last keys and values
        return hidden

    def _batch(self, spans: list[ChunkInputs]) -> StepBatch:
        decoding = sum(len(span.tokens) == 1 for span in spans)
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        wanted: list[int] = []
        for span in spans:
            wanted += [len(tokens) + position - span.start for position in span.wanted]
            tokens += span.tokens
            inside = range(span.start, span.end)
            positions += inside
            pages += [span.pages[position // self._page_size] for position in inside]
        position = self._tensor(positions)
        decode_reads = self._by_window(spans[:decoding])
        return StepBatch(
            tokens=self._tensor(tokens),
            rotation=rotations(position, self._frequencies, self._attention_factor),
            writes=token_rows(
                self._tensor(pages), position % self._page_size, self._layers, self._page_size
            ),
            decoding=decoding,
            decode_reads=decode_reads,
            chunks=self._chunks(spans[decoding:], decoding),
            samples=self._tensor(wanted),
            sample_reads=self._sample_reads(spans, decode_reads),
        )

    def _by_window(self, decoding: list[ChunkInputs]) -> dict[int | None, DecodeReads]:
        if not decoding:
            return {}
        last = [span.start for span in decoding]
        return {window: self._decode_reads(decoding, last, window) for window in self._windows}

    def _sample_reads(
        self, spans: list[ChunkInputs], decode_reads: dict[int | None, DecodeReads]
    ) -> DecodeReads | None:
        """What the rows whose logits are wanted read in the last layer, each by itself."""
        window = self._model.layers[-1].window
        if decode_reads and all(len(span.tokens) == 1 and span.wanted for span in spans):
            return decode_reads[window]
        wanted = [(span, position) for span in spans for position in span.wanted]
        if not wanted:
            return None
        of, positions = [span for span, _ in wanted], [position for _, position in wanted]
        return self._decode_reads(of, positions, window)

    def _chunks(self, spans: list[ChunkInputs], row: int) -> list[ChunkRows]:
        chunks = []
        for span in spans:
            reads = {window: self._chunk_reads(span, window) for window in self._windows}
            chunks.append(ChunkRows(row, row + len(span.tokens), reads))
            row += len(span.tokens)
        return chunks

    def _decode_reads(
        self, spans: list[ChunkInputs], last: list[int], window: int | None
    ) -> DecodeReads:
        """The pages that hold what the query at each of the positions `last` sees."""
        size = self._page_size
        first = [_first_visible(position, window) for position in last]
        seen = [
            span.pages[start // size : end // size + 1]
            for span, start, end in zip(spans, first, last, strict=True)
        ]
        width = max(map(len, seen))
        pages = [page for each in seen for page in each + each[-1:] * (width - len(each))]
        ends = [end + 1 - start // size * size for start, end in zip(first, last, strict=True)]
        return DecodeReads(
            tables=self._tensor(pages).view(len(spans), width),
            first=self._tensor([start % size for start in first]),
            end=self._tensor(ends),
            longest=max(ends),
        )

    def _chunk_reads(self, span: ChunkInputs, window: int | None) -> ChunkReads:
        """The pages that hold what any of the chunk's queries sees."""
        size, start, end = self._page_size, span.start, span.end
        masked = window is not None and window < end
        if start == 0 and not masked:
            return ChunkReads(None, end, None)
        first_page = _first_visible(start, window) // size
        pages = span.pages[first_page : (end - 1) // size + 1]
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

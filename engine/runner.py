"""Turns a plan into one batch of tensors, runs it, and samples.

What the layers share (positions, page indices, masks) is computed once per step. If several
ranks run the model, rank 0 runs plans and the others follow.
"""

from __future__ import annotations

import pickle
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.page_reach import LayerSlices
from baton.core.types import Adapter
from baton.engine.adapter_weights import load_adapter
from baton.engine.architecture import Split
from baton.engine.logprobs import prompt_rows, score, score_prompts, store_prompt_scores
from baton.engine.model import ChunkRows, Model, StepBatch
from baton.engine.pooled_rows import pool_rows
from baton.engine.recorded_steps import RecordedSteps
from baton.engine.rotations import Rotation
from baton.engine.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.engine.step import (
    AdapterChange,
    Checked,
    ChunkInputs,
    Drawn,
    FinishedStep,
    Outcome,
    Plan,
    check_plan,
    chunk_inputs,
    drawing_of,
    in_row_order,
    outcome_of,
)
from baton.engine.tensor_parallel import Group
from baton.kernels.attention import ChunkReads, DecodeReads, prepare_attention
from baton.kernels.cache import layer_caches, prepare_rotation, token_rows
from baton.kernels.low_rank import AdaptedRows, AdapterProducts


class StepRows(NamedTuple):
    """The rows of a step: one for each token."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    writes: list[Tensor]  # by table, [T, 2], rows of LayerCache.tokens
    wanted: Tensor  # [n], the rows that the last layer computes, in order


class StepRunner:
    """Runs plans of any model over the paged memory `kv`
    [page, layer of a slice, k/v, token, kv_head, dim]; subclasses implement the forward pass."""

    runs_ahead = False

    def __init__(
        self,
        kv: Tensor,
        slices: LayerSlices,
        vocabulary_size: int,
        value_dim: int | None = None,
        group: Group | None = None,
    ) -> None:
        self._group = group
        self._windows = slices.windows
        self._caches = layer_caches(kv, value_dim, slices.places)
        _, self._layers, self._parts, self._page_size = kv.shape[:4]
        self._device = kv.device
        self._sampler = Sampler(vocabulary_size)

    def _forward(self, inputs: list[ChunkInputs]) -> Tensor:
        """The last layer's output for the wanted rows, [n, hidden]."""
        raise NotImplementedError

    def _logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] of `_forward`'s output."""
        raise NotImplementedError

    def _normed(self, hidden: Tensor) -> Tensor:
        """`_forward`'s output after the model's last norm."""
        raise NotImplementedError

    @torch.inference_mode()
    def launch(self, plan: Plan) -> FinishedStep:
        """Runs one forward for all chunks and samples the next tokens where the plan asks for
        them."""
        check_plan(plan, self._page_size)
        rows = in_row_order(plan)
        inputs = [chunk_inputs(*chunk, self._page_size) for chunk in rows.items()]
        if self._group:
            self._group.broadcast(pickle.dumps(inputs))
        hidden = self._forward(inputs)
        sampled = self._score_prompts(hidden, rows)
        owners = [each for each, chunk in zip(rows, inputs, strict=True) for _ in chunk.wanted]
        pooled = pool_rows(owners, lambda: self._normed(hidden), self._tensor)
        outcomes: dict[Sequence, Outcome] = dict.fromkeys(plan)
        if len(sampled):
            outcomes.update(self._draw(sampled, rows))
        if pooled:
            pooled.store()
        for sequence, count in plan.items():
            outcome = outcomes[sequence]
            right = len(outcome.drawn) - 1 if isinstance(outcome, Checked) else 0
            sequence.computed += count + right
        return FinishedStep(list(outcomes.values()))

    def _draw(self, hidden: Tensor, plan: Plan) -> dict[Sequence, Outcome]:
        """Samples one token for each row of hidden [n, ...]."""
        drawing = drawing_of(plan)
        rows = [row for ahead in drawing.values() for row in ahead]
        logits = self._logits(hidden)
        tokens = self._sampler.sample(logits, rows)
        drawn: dict[Sequence, Drawn] = dict(zip(rows, tokens, strict=True))
        for scores in score(logits[:, : self._sampler.vocabulary_size], tokens, rows):
            drawn.update(scores.by_row())
        return {
            sequence: outcome_of(sequence.take_guesses(), [drawn[row] for row in ahead])
            for sequence, ahead in drawing.items()
        }

    def _score_prompts(self, hidden: Tensor, plan: Plan) -> Tensor:
        """Scores the prompts' rows among hidden [n, ...], the wanted rows. Returns the rows that
        sample."""
        rows = prompt_rows(plan)
        if not rows:
            return hidden
        sampled = torch.ones(len(hidden), dtype=torch.bool)
        sampled[[row.place for row in rows]] = False
        scored = [row for row in rows if row.sequence.pooled is None]
        prompts = hidden[[row.place for row in scored]]

        def logits_of(part: slice) -> Tensor:
            return self._logits(prompts[part])[:, : self._sampler.vocabulary_size]

        store_prompt_scores(score_prompts(scored, logits_of))
        return hidden[sampled]

    def _rows(self, inputs: list[ChunkInputs]) -> StepRows:
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[list[int]] = [[] for _ in self._windows]
        wanted: list[int] = []
        for chunk in inputs:
            wanted += [len(tokens) + position - chunk.start for position in chunk.wanted]
            tokens += chunk.tokens
            inside = range(chunk.start, chunk.end)
            positions += inside
            for held, table in zip(pages, chunk.tables, strict=True):
                held += [table[position // self._page_size] for position in inside]
        position = self._tensor(positions)
        offsets = position % self._page_size
        writes = [
            token_rows(self._tensor(held), offsets, self._layers, self._page_size, self._parts)
            for held in pages
        ]
        return StepRows(self._tensor(tokens), position, writes, self._tensor(wanted))

    def _reads_by_table(self, decoding: list[ChunkInputs]) -> list[DecodeReads]:
        """The reads of rows that decode; empty without any."""
        if not decoding:
            return []
        rows = [(chunk, at) for chunk in decoding for at in range(chunk.start, chunk.end)]
        return [self._decode_reads(rows, table) for table in range(len(self._windows))]

    def _decode_reads(self, rows: list[tuple[ChunkInputs, int]], table: int) -> DecodeReads:
        """The pages of a table that the queries at these positions of chunks see."""
        size, window = self._page_size, self._windows[table]
        chunks, last = zip(*rows, strict=True)
        first = [_first_visible(position, window) for position in last]
        seen = [
            chunk.tables[table][start // size : end // size + 1]
            for chunk, start, end in zip(chunks, first, last, strict=True)
        ]
        width = max(map(len, seen))
        pages = [page for each in seen for page in each + each[-1:] * (width - len(each))]
        starts = [each // size * size for each in first]
        return DecodeReads(
            tables=self._tensor(pages).view(len(chunks), width),
            start=self._tensor(starts),
            first=self._tensor(first),
            end=self._tensor([position + 1 for position in last]),
            longest=max(end + 1 - start for start, end in zip(starts, last, strict=True)),
            cut=max(starts) > 0,
        )

    def _chunk_reads(self, chunk: ChunkInputs) -> list[ChunkReads]:
        """The pages that the chunk's queries see, by table."""
        size, start, end = self._page_size, chunk.start, chunk.end
        reads = []
        for table, window in zip(chunk.tables, self._windows, strict=True):
            hiding = window if window is not None and window < end else None
            first_page = _first_visible(start, hiding) // size
            pages = self._tensor(table[first_page : (end - 1) // size + 1])
            reads.append(ChunkReads(pages, first_page * size, start, end, hiding))
        return reads

    def _chunks(self, inputs: list[ChunkInputs], row: int) -> list[ChunkRows]:
        chunks = []
        for chunk in inputs:
            chunks.append(ChunkRows(row, row + len(chunk.tokens), self._chunk_reads(chunk)))
            row += len(chunk.tokens)
        return chunks

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class Runner(StepRunner):
    """Runs plans of a native `model`. In a group, `model` and `kv` are this rank's part."""

    def __init__(self, model: Model, kv: Tensor, group: Group | None = None) -> None:
        shape = model.architecture
        super().__init__(kv, shape.slices, shape.vocabulary_size, shape.value_dim, group)
        self._model = model
        self.adapters: dict[bytes, AdapterProducts] = {}  # loaded, by digest
        last = shape.latent is not None
        self._rotations = [
            Rotation(rope, shape.head_dim, kv.device, last=last) for rope in shape.ropes
        ]
        model.pack()
        cache, dtype = self._caches[0], model.embedding.dtype
        prepare_attention(shape.heads, cache, model.layers[0].scoring, dtype)
        prepare_rotation(cache, dtype)
        self.recorded = RecordedSteps(model, self._caches)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def _normed(self, hidden: Tensor) -> Tensor:
        return self._model.norm(hidden)

    @torch.inference_mode()
    def follow(self, step: bytes) -> None:
        """Follows rank 0: runs this rank's part of its step, or loads or drops an adapter."""
        message = pickle.loads(step)
        if not isinstance(message, AdapterChange):
            self._forward(message)
        elif message.loaded:
            self.add_adapter(message.adapter, self.load_adapter(message.adapter))
        else:
            self.drop_adapter(message.adapter.digest)

    def load_adapter(self, adapter: Adapter) -> AdapterProducts:
        """Loads this rank's part. May be called from another thread."""
        split = self._group.split if self._group else Split()
        return load_adapter(adapter, self._model, split, self._model.embedding.dtype)

    def add_adapter(self, adapter: Adapter, products: AdapterProducts) -> None:
        self.adapters[adapter.digest] = products
        self._broadcast(AdapterChange(adapter, loaded=True))

    def drop_adapter(self, digest: bytes) -> None:
        del self.adapters[digest]
        self._broadcast(AdapterChange(Adapter(digest, ""), loaded=False))

    def _broadcast(self, change: AdapterChange) -> None:
        """Sends the change to the other ranks. On rank 0."""
        if self._group:
            self._group.broadcast(pickle.dumps(change))

    def _forward(self, inputs: list[ChunkInputs]) -> Tensor:
        """The last layer's output for the wanted rows, [n, hidden]. On rank 0 it returns when all
        ranks have written."""
        batch = self._batch(inputs)
        if not self._group:
            return self.recorded.forward(batch)
        hidden = self._model.forward(batch, self._caches)
        if not len(hidden):
            self._group.wait()  # nothing is summed after the last layer's keys and values
        return hidden

    def _batch(self, inputs: list[ChunkInputs]) -> StepBatch:
        single = sum(chunk.decodes for chunk in inputs)
        rows = self._rows(inputs)
        decode_reads = self._reads_by_table(inputs[:single])
        decoding = sum(len(chunk.tokens) for chunk in inputs[:single])
        adapted, sample_adapted = self._adapted(inputs)
        return StepBatch(
            tokens=rows.tokens,
            rotations=[rotation(rows.positions) for rotation in self._rotations],
            writes=rows.writes,
            decoding=decoding,
            decode_reads=decode_reads,
            chunks=self._chunks(inputs[single:], decoding),
            samples=rows.wanted,
            sample_reads=self._sample_reads(inputs, decode_reads),
            adapted=adapted,
            sample_adapted=sample_adapted,
        )

    def _adapted(self, inputs: list[ChunkInputs]) -> tuple[AdaptedRows | None, AdaptedRows | None]:
        """The adapters of all rows, and of those whose logits are needed; None without any."""
        if not any(chunk.adapter for chunk in inputs):
            return None, None
        rows: list[AdapterProducts | None] = []
        samples: list[AdapterProducts | None] = []
        for chunk in inputs:
            products = self.adapters[chunk.adapter] if chunk.adapter else None
            rows += [products] * len(chunk.tokens)
            samples += [products] * len(chunk.wanted)
        return AdaptedRows(rows), AdaptedRows(samples)

    def _sample_reads(
        self, inputs: list[ChunkInputs], decode_reads: list[DecodeReads]
    ) -> DecodeReads | None:
        """What each wanted row reads in the last layer."""
        table = self._caches[-1].table
        if decode_reads and all(chunk.decodes and chunk.wanted for chunk in inputs):
            return decode_reads[table]
        wanted = [(chunk, position) for chunk in inputs for position in chunk.wanted]
        if not wanted:
            return None
        return self._decode_reads(wanted, table)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)

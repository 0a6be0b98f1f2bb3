"""Runs plans on a GPU without waiting for it.

`launch` returns while the step still runs. Sampled tokens stay on the device for the next
step; the host sees them when it waits for the step. So the host plans step n + 1 while the
device runs step n.

A step that only decodes, or only prefills short prompts, is replayed from a recording; any
other is launched kernel by kernel.

If several ranks run the model, rank 0 broadcasts each step before it launches its own part,
and shares the step's tokens from device to device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.gpu import graphs
from baton.engine.gpu.adapter_rows import AdapterInputs, StepAdapters
from baton.engine.gpu.adapter_slots import CHANGE, AdapterSlots
from baton.engine.gpu.batch import (
    INPUT_ROWS,
    Ints,
    Limits,
    StepArrays,
    StepMessage,
    decode_step,
    download,
    encode_step,
    step_arrays,
    upload,
    upload_into,
)
from baton.engine.gpu.forward import Attend, Forward, uses_fp8
from baton.engine.gpu.graphs import Recording, Recordings
from baton.engine.gpu.latent_attention import LatentAttention
from baton.engine.gpu.numerics import Numerics
from baton.engine.gpu.paged_attention import PagedAttention
from baton.engine.gpu.prompt_attention import supports
from baton.engine.gpu.sampler import GpuSampler
from baton.engine.gpu.slots import Slots
from baton.engine.gpu.step import GpuInFlightStep
from baton.engine.gpu.wanted_rows import WantedRows
from baton.engine.logprobs import PromptRow, Scores, score, score_prompts
from baton.engine.model import Model
from baton.engine.pooled_rows import PooledStep, pool_rows
from baton.engine.sequence import Sequence
from baton.engine.step import Plan, check_plan, in_row_order, with_guesses
from baton.engine.tensor_parallel import Group
from baton.kernels.gpu.chunk_attention import BLOCK_QUERIES
from baton.kernels.gpu.compile import compiling
from baton.kernels.gpu.guess_attention import rows_together
from baton.kernels.gpu.tokens import begin, remember

SLOTS = 1024
"""Least number of sequences in the device's page table."""

SAMPLED_ROWS = 256
"""Prompts whose logits are computed at a time."""

SPARE_BLOCKS = 16
"""Least number of blocks of a recorded prompt step beyond what one prompt of its size needs."""


class Chosen(NamedTuple):
    """The tokens of the rows that sample, [n], int32, and requested log probabilities."""

    tokens: Tensor
    scores: list[Scores[Sequence]]
    prompt_scores: tuple[Scores[PromptRow], ...] = ()  # of rows that do not sample
    pooled: PooledStep | None = None


class GpuRunner:
    """Runs plans of `model` over the paged memory `kv` [page, layer, k/v, token, kv_head, dim].

    In a group, which must be connected, both are this rank's part.
    """

    runs_ahead = True

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        context: int,
        max_batch: int,
        group: Group | None = None,
        numerics: Numerics = Numerics.INVARIANT,
        chunk_tokens: int = 8192,
        adapters: AdapterSlots | None = None,
        *,
        guesses: bool = False,
        short_chunk: int = 1,
    ) -> None:
        """`guesses`: steps with guesses are recorded too. `short_chunk`: see GpuSettings."""
        shape, device = model.architecture, kv.device
        self._adapters = adapters
        self._guesses = guesses
        self._forward = Forward(model, numerics)
        self._device = device
        self._group = group
        self._recordable = device.type == "cuda" and (group is None or group.recordable)
        recorded = graphs.prompt_rows(shape, chunk_tokens, fp8=uses_fp8(model))
        self.recorded_rows = recorded[-1]  # most rows of a recorded step over prompts
        self._limits = Limits(
            page_size=kv.shape[3],
            decoding=max_batch,
            long_chunks=supports(shape, model.embedding.dtype, kv.device, numerics),
            slices=len(shape.slices.windows),
            recorded=recorded[-1],
            together=rows_together(shape.heads, shape.kv_heads, model.embedding.dtype, kv.dtype),
            short=short_chunk,
        )
        self._row_inputs = INPUT_ROWS + self._limits.slices
        pages = -(-context // self._limits.page_size)
        self._slots = Slots(slot_count(max_batch), pages, device, self._limits.slices)
        tables = self._slots.tables
        self._attention = (
            LatentAttention(model, kv, tables[0], context, max_batch)
            if shape.latent
            else PagedAttention(model, kv, tables, context, max_batch, numerics)
        )
        self._sampler = GpuSampler(shape.vocabulary_size)
        most = max(max_batch, recorded[-1])
        inputs = (self._row_inputs + 4) * most + 4 * SPARE_BLOCKS
        self._inputs = torch.zeros(inputs, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int32, device=device)
        self._logits = model.head.weight.new_empty(max_batch, len(model.head.weight))
        self._adapter_inputs = AdapterInputs(adapters, most, device) if adapters else None
        # Steps without adapters have recordings of their own, in which these cost nothing.
        self._recordings = {False: self._recordings_of(max_batch, recorded, lambda rows: None)}
        if self._adapter_inputs:
            inputs_of = self._adapter_inputs.recorded
            self._recordings[True] = self._recordings_of(max_batch, recorded, inputs_of)

    def _recordings_of(
        self,
        max_batch: int,
        prompts: list[int],
        adapters: Callable[[int], StepAdapters | None],
    ) -> Recordings:
        """`adapters` returns the adapters of a step with this number of rows."""
        counts = graphs.row_counts(max_batch)
        return Recordings(
            {rows: Recording(self._decode_body(rows, adapters(rows))) for rows in counts},
            {rows: Recording(self._guess_body(rows, adapters(rows))) for rows in counts},
            {rows: Recording(self._prompt_body(rows, adapters(rows))) for rows in prompts},
        )

    @torch.inference_mode()
    def record(self, progress: Callable[[float], None] = lambda done: None) -> None:
        """Records every replayed step; called once, before the first launch.

        Leaves pages unchanged: after a role switch they hold the worker's cache.
        """
        if not self._recordable:
            return
        padding, slices = self._slots.padding, self._limits.slices
        # The largest first: the smaller ones reuse its memory.
        steps = (
            [
                (StepArrays.idle(rows, 0, padding, slices, decodes=True), recording)
                for each in self._recordings.values()
                for rows, recording in reversed(each.decode.items())
            ]
            + [
                (StepArrays.idle(rows, rows, padding, slices, decodes=True), recording)
                for each in self._recordings.values()
                if self._guesses
                for rows, recording in reversed(each.guess.items())
            ]
            + [
                (StepArrays.idle(rows, _blocks_of(rows), padding, slices, decodes=False), recording)
                for each in self._recordings.values()
                for rows, recording in reversed(each.prompt.items())
            ]
        )
        recorder = graphs.Recorder()
        for done, (idle, recording) in enumerate(steps):
            upload_into(self._inputs, idle.joined())
            recording.record(recorder)
            progress((done + 1) / len(steps))
        torch.cuda.empty_cache()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Compiles the kernels of all steps that are recorded later, and of steps that are
        launched meanwhile, which compute nothing."""
        whole = self._forward
        self._forward = whole.with_few_layers()
        try:
            with compiling():
                self._run_recordings()
                yield
        finally:
            self._forward = whole

    @torch.inference_mode()
    def _run_recordings(self) -> None:
        if self._recordable:
            for decode, guess, prompt in self._recordings.values():
                for kind in (decode, prompt, *([guess] if self._guesses else [])):
                    for recording in kind.values():
                        recording.replay()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> GpuInFlightStep:
        """Starts one forward for all chunks and advances their sequences."""
        check_plan(plan, self._limits.page_size)
        ordered = in_row_order(plan)
        slots, new_pages = self._slots.place([sequence.lease for sequence in ordered])
        adapters = self._adapters.slots_of(with_guesses(ordered)) if self._adapters else None
        arrays = step_arrays(ordered, slots, self._limits, adapters)
        rows = WantedRows.of(ordered)
        if self._group:
            self._group.broadcast(encode_step(StepMessage(arrays, new_pages, rows.all)))
        chosen = self._step(arrays, upload(new_pages, self._device), rows)
        prompt_scores = [each.moved(download) for each in chosen.prompt_scores]
        sums = chosen.pooled.moved(download) if chosen.pooled else None
        if not rows.drawing:
            return GpuInFlightStep(plan, rows.drawing, None, (), prompt_scores, sums)
        filled = arrays.only_decodes and len(rows.samples) == arrays.count
        where = self._filled if filled else self._indices(arrays.slots[rows.samples])
        remember(chosen.tokens, where, self._slots.last_tokens)
        scores = [each.moved(download) for each in chosen.scores]
        tokens = download(chosen.tokens)
        return GpuInFlightStep(plan, rows.drawing, tokens, scores, prompt_scores, sums)

    @torch.inference_mode()
    def follow(self, step: bytes) -> None:
        """Follows rank 0: starts this rank's part of its step, or makes its change of
        adapters."""
        if step.startswith(CHANGE) and self._adapters:
            self._adapters.follow(step)
            return
        arrays, new_pages, wanted = decode_step(step)
        pages = upload(new_pages, self._device)
        if arrays.only_decodes:
            self._decoded(arrays, pages)
        else:
            self._normed(arrays, pages, wanted)

    def _step(self, arrays: StepArrays, pages: Tensor, rows: WantedRows) -> Chosen:
        """Starts a step and samples its tokens."""
        if not arrays.only_decodes:
            normed = self._normed(arrays, pages, rows.all)
            pooled = pool_rows(rows.owners, lambda: normed, self._indices)
            return self._sample(normed, rows)._replace(pooled=pooled)
        logits = self._decoded(arrays, pages)
        if len(rows.samples) == len(logits):
            return self._choose(logits, rows.sequences)
        logits = logits[upload(rows.all, self._device)]
        chosen = self._choose(logits[: len(rows.samples)], rows.sequences)
        return chosen._replace(prompt_scores=self._score_prompts(rows, logits.__getitem__))

    def _decoded(self, arrays: StepArrays, pages: Tensor) -> Tensor:
        """The logits of a step that only decodes, [T, vocabulary]."""
        count = arrays.count
        kinds = self._recordings_for(arrays)
        recordings = kinds.guess if arrays.guesses else kinds.decode
        size = next(size for size in recordings if size >= count)
        blocks = size if arrays.guesses else 0
        self._fill(arrays.padded(size, blocks, self._slots.padding), pages)
        return recordings[size].replay()[:count]

    def _normed(self, arrays: StepArrays, pages: Tensor, wanted: Ints) -> Tensor:
        """The last layer's output for rows `wanted` [n] of any other step, [n, hidden]."""
        recorded = self._recorded_prompt(arrays)
        if recorded is None:
            return self._run(arrays, pages, wanted)
        self._fill(arrays.padded(recorded, _blocks_of(recorded), self._slots.padding), pages)
        recording = self._recordings_for(arrays).prompt[recorded]
        return recording.replay()[upload(wanted, self._device)]

    def _recordings_for(self, arrays: StepArrays) -> Recordings:
        return self._recordings[arrays.adapters is not None]

    def _sample(self, normed: Tensor, wanted: WantedRows) -> Chosen:
        """Samples and scores. normed [n, ...]: the last layer's output for all wanted rows."""
        sequences = wanted.sequences
        tokens = [normed.new_empty(0, dtype=torch.int32)]
        scores: list[Scores[Sequence]] = []
        for start in range(0, len(sequences), SAMPLED_ROWS):
            rows = slice(start, start + SAMPLED_ROWS)
            logits = self._forward.logits(normed[: len(sequences)][rows])
            chosen = self._choose(logits, sequences[rows])
            tokens.append(chosen.tokens)
            scores += chosen.scores
        prompts = self._score_prompts(wanted, lambda some: self._forward.logits(normed[some]))
        return Chosen(torch.cat(tokens), scores, prompts)

    def _score_prompts(
        self, rows: WantedRows, logits_at: Callable[[slice], Tensor]
    ) -> tuple[Scores[PromptRow], ...]:
        """`logits_at` computes the logits of some of the wanted rows."""
        first = len(rows.samples)
        end = first + len(rows.prompts)

        def logits_of_prompts(part: slice) -> Tensor:
            known = logits_at(slice(first + part.start, min(first + part.stop, end)))
            return known[:, : self._sampler.vocabulary_size]

        return tuple(score_prompts(rows.prompts, logits_of_prompts))

    def _choose(self, logits: Tensor, sequences: list[Sequence]) -> Chosen:
        """logits [n, ...], one row per sequence."""
        tokens = self._sampler.sample(logits, sequences)
        known = logits[:, : self._sampler.vocabulary_size]
        return Chosen(tokens, list(score(known, tokens, sequences)))

    def _indices(self, values: list[int] | Ints) -> Tensor:
        return upload(np.asarray(values, dtype=np.int32), self._device)

    def _recorded_prompt(self, arrays: StepArrays) -> int | None:
        """The rows of the recording that fits a step over prompts alone, if there is one."""
        if arrays.decoding or arrays.long:
            return None
        fitting = (
            rows
            for rows in self._recordings[False].prompt
            if rows >= arrays.count and _blocks_of(rows) >= len(arrays.blocks)
        )
        return next(fitting, None)

    def _fill(self, arrays: StepArrays, pages: Tensor) -> None:
        """Copies a step's inputs to where its recording reads them."""
        upload_into(self._inputs, arrays.joined())
        count = arrays.count
        if arrays.adapters is not None and self._adapter_inputs:
            self._adapter_inputs.fill(arrays.adapters)
        staged, self._filled = self._inputs[: 2 * count].view(2, count)
        self._begin(staged, self._filled, self._tokens[:count], pages)

    def _begin(self, staged: Tensor, slots: Tensor, tokens: Tensor, pages: Tensor) -> None:
        begin(staged, slots, self._slots.last_tokens, tokens, self._slots.table, pages)
        if self._group:
            self._group.share(tokens)

    def _decode_body(self, rows: int, adapters: StepAdapters | None) -> Callable[[], Tensor]:
        _, slots, positions = self._inputs[: 3 * rows].view(3, rows)
        return self._body(rows, self._attention.of_decoding(slots, positions), adapters)

    def _guess_body(self, rows: int, adapters: StepAdapters | None) -> Callable[[], Tensor]:
        end = self._row_inputs * rows
        inputs = self._inputs[:end].view(-1, rows)
        (_, slots, positions), stores = inputs[:INPUT_ROWS], inputs[INPUT_ROWS:]
        blocks = self._inputs[end : end + 4 * rows].view(-1, 4)
        attend = self._attention.of_guesses(slots, positions, stores, blocks)
        return self._body(rows, attend, adapters)

    def _body(
        self, rows: int, attend: Attend, adapters: StepAdapters | None
    ) -> Callable[[], Tensor]:
        tokens, logits = self._tokens[:rows], self._logits[:rows]
        return lambda: self._forward.logits(
            self._forward(tokens, attend, adapters=adapters), logits
        )

    def _prompt_body(self, rows: int, adapters: StepAdapters | None) -> Callable[[], Tensor]:
        end = self._row_inputs * rows
        inputs = self._inputs[:end].view(-1, rows)
        positions, stores = inputs[2], inputs[INPUT_ROWS:]
        blocks = self._inputs[end : end + 4 * _blocks_of(rows)].view(-1, 4)
        attend = self._attention.of_blocks(positions, stores, blocks)
        return lambda: self._forward(self._tokens[:rows], attend, adapters=adapters)

    def _run(self, arrays: StepArrays, pages: Tensor, samples: Ints) -> Tensor:
        """A step of any shape, kernel by kernel: the last layer's output for its samples."""
        count = arrays.count
        there = upload(arrays.joined(), self._device)
        inputs = there[: self._row_inputs * count].view(-1, count)
        (staged, slots, positions), stores = inputs[:INPUT_ROWS], inputs[INPUT_ROWS:]
        blocks = there[inputs.numel() :].view(-1, 4)
        tokens = torch.empty_like(staged)
        self._begin(staged, slots, tokens, pages)
        sampled = upload(samples, self._device)
        attend = self._attention.of_any(arrays, slots, positions, stores, blocks, sampled)
        adapters = None
        if arrays.adapters is not None and self._adapter_inputs:
            adapters = self._adapter_inputs.of_step(arrays.adapters, samples)
        normed = self._forward(tokens, attend, sampled, adapters)
        if self._group and not len(samples):
            self._group.wait()  # nothing is summed after the last layer's keys and values
        return normed


def slot_count(max_batch: int) -> int:
    return max(SLOTS, 4 * max_batch)


def _blocks_of(rows: int) -> int:
    """Blocks of a recorded step over prompts."""
    return rows // BLOCK_QUERIES + max(SPARE_BLOCKS, rows // 32)

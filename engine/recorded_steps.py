"""Records and repeats steps in which every sequence decodes one token: on a CPU, Python takes
longer than the products of few rows (kernels/cpu/recording.py).

A recording has its own memory for what differs between steps: the rows, their rotations, the rows
of keys and values that they write, and the pages that they read. There is one recording for each
number of rows and width of the page tables.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.model import Model, StepBatch
from baton.kernels.attention import DecodeReads
from baton.kernels.cache import LayerCache
from baton.kernels.cpu import compiler

log = logging.getLogger(__name__)

MOST_ROWS = 64
"""With more rows, products take nearly all of a step's time."""

MOST_RECORDED_ROWS = 512
"""Limit of the rows of all recordings together: each keeps memory for its rows."""
LEAST_WIDTH = 64
"""Pages. The width of tables is a power of two, so that few recordings serve all contexts. A larger
width takes no longer, and saves recordings: steps with guesses have many numbers of rows, and each
number is recorded for each width."""

Key = tuple[int, int, tuple[tuple[int, bool], ...]]
"""Threads, rows, and of each table the width and whether it starts after the first token."""


class RecordedSteps:
    def __init__(self, model: Model, caches: list[LayerCache]) -> None:
        self._model, self._caches = model, caches
        self._steps: OrderedDict[Key, _RecordedStep] = OrderedDict()  # least recently used first
        self.enabled = compiler.suits(model.embedding.dtype, caches[0].kv.device)

    def forward(self, batch: StepBatch) -> Tensor:
        """Like Model.forward."""
        if not (self.enabled and _only_decodes(batch)):
            return self._model.forward(batch, self._caches)
        shapes = tuple(map(_shape, batch.decode_reads))
        key: Key = (torch.get_num_threads(), len(batch.tokens), shapes)
        if step := self._steps.get(key):
            self._steps.move_to_end(key)
            return step.repeat(batch)
        return self._record(key, batch)

    def _record(self, key: Key, batch: StepBatch) -> Tensor:
        step = _RecordedStep(self._model, self._caches, batch, key[-1])
        if step.foreign:
            log.info("steps are not recorded: %s between compiled calls", ", ".join(step.foreign))
            self.enabled = False
        else:
            self._steps[key] = step
            while sum(rows for _, rows, _ in self._steps) > MOST_RECORDED_ROWS:
                self._steps.popitem(last=False)
        return step.found


class _RecordedStep:
    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        batch: StepBatch,
        shapes: tuple[tuple[int, bool], ...],
    ) -> None:
        from baton.kernels.cpu.recording import CallRecording  # imports llvmlite

        page_size = caches[0].kv.shape[2]
        self._model = model
        self._hidden = model.embed(batch.tokens)
        reads = [
            _with_width(each, width, page_size)
            for each, (width, _) in zip(batch.decode_reads, shapes, strict=True)
        ]
        self._batch = replace(
            batch,
            rotations=[each.clone() for each in batch.rotations],
            writes=[each.clone() for each in batch.writes],
            decode_reads=reads,
            sample_reads=reads[caches[-1].table],
        )
        with CallRecording() as self._recording:
            self.found = model.run_layers(self._hidden, self._batch, caches)
        self.foreign = self._recording.foreign

    def repeat(self, batch: StepBatch) -> Tensor:
        own = self._batch
        self._hidden.copy_(self._model.embed(batch.tokens))
        for target, source in zip(own.rotations, batch.rotations, strict=True):
            target.copy_(source)
        for target, source in zip(own.writes, batch.writes, strict=True):
            target.copy_(source)
        for into, reads in zip(own.decode_reads, batch.decode_reads, strict=True):
            into.tables[:, : reads.tables.shape[1]] = reads.tables
            into.start.copy_(reads.start)
            into.first.copy_(reads.first)
            into.end.copy_(reads.end)
        self._recording.repeat()
        return self.found


def _only_decodes(batch: StepBatch) -> bool:
    rows = len(batch.tokens)
    if batch.adapted is not None or batch.chunks or rows > MOST_ROWS:
        return False
    return rows == batch.decoding == len(batch.samples)


def _shape(reads: DecodeReads) -> tuple[int, bool]:
    width = max(LEAST_WIDTH, 1 << (reads.tables.shape[1] - 1).bit_length())
    return width, reads.cut


def _with_width(reads: DecodeReads, width: int, page_size: int) -> DecodeReads:
    tables = torch.zeros(len(reads.tables), width, dtype=reads.tables.dtype)
    tables[:, : reads.tables.shape[1]] = reads.tables
    return DecodeReads(
        tables,
        reads.start.clone(),
        reads.first.clone(),
        reads.end.clone(),
        longest=width * page_size,
        cut=reads.cut,
    )

"""Steps of a model of transformers, and the check that it answers as it does alone."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from baton.core.errors import UnsupportedModel
from baton.engine.fallback.attention_interface import PagedStep
from baton.engine.fallback.fallback_model import FallbackModel
from baton.engine.runner import StepRunner
from baton.engine.step import ChunkInputs

CHECK_PAGE, CHECK_TOKENS = 4, 24
CHECK_CHUNKS = ((0, 9), (9, 23), (23, 24))
"""How the checked sequence is cut: two chunks, and a single token."""

TOLERANCE = {torch.float32: 1e-3}
"""Largest relative distance of logits; other types have HALF_TOLERANCE."""
HALF_TOLERANCE = 0.1


class FallbackRunner(StepRunner):
    """Runs plans of `model` over the paged memory `kv` [page, layer, 2, token, kv_head, dim]."""

    def __init__(self, model: FallbackModel, kv: Tensor) -> None:
        shape = model.architecture
        super().__init__(kv, shape.slices, shape.vocabulary_size)
        self._model = model

    def follow(self, step: bytes) -> None:
        raise NotImplementedError("a model that runs through transformers has one rank")

    def _forward(self, inputs: list[ChunkInputs]) -> Tensor:
        rows = self._rows(inputs)
        step = self._paged_step(inputs, rows.writes)
        hidden = self._model.forward(rows.tokens, rows.positions, rows.wanted, step)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # pages are sent once a step has ended
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden  # the head's input

    def _paged_step(self, inputs: list[ChunkInputs], writes: list[Tensor]) -> PagedStep:
        count = sum(chunk.decodes for chunk in inputs)
        decoding = sum(len(chunk.tokens) for chunk in inputs[:count])
        chunks = self._chunks(inputs[count:], decoding)
        single = self._reads_by_table(inputs[:count])
        return PagedStep(self._caches, writes, decoding, single, chunks)

    @torch.inference_mode()
    def check_against_transformers(self) -> None:
        """Raises UnsupportedModel unless a sequence that is cut and runs in company, over pages,
        has the logits that transformers computes for it whole and alone. Overwrites pages."""
        shape = self._model.architecture
        tokens = torch.randint(
            shape.vocabulary_size, (CHECK_TOKENS,), generator=torch.Generator().manual_seed(0)
        )
        listed, count = tokens.tolist(), CHECK_TOKENS // CHECK_PAGE
        numbers = iter(range(len(self._caches[0].kv)))
        pages, other = (
            [list(itertools.islice(numbers, count)) for _ in self._windows] for _ in range(2)
        )
        found = []
        for start, end in CHECK_CHUNKS:
            checked = ChunkInputs(start, listed[start:end], pages, [end - 1])
            company = ChunkInputs(0, listed[::-1][: end - start + 1], other, [])
            inputs = sorted((company, checked), key=lambda chunk: len(chunk.tokens) > 1)
            found.append(self._logits(self._forward(inputs)))
        rows = [end - 1 for _, end in CHECK_CHUNKS]
        expected = self._model.reference_logits(tokens.to(self._device))[rows].float()
        distance = (torch.cat(found).float() - expected).norm() / expected.norm()
        if not distance <= TOLERANCE.get(self._caches[0].kv.dtype, HALF_TOLERANCE):
            raise UnsupportedModel(
                f"{shape.class_name} does not answer over pages as transformers does alone"
                f" (relative distance of logits {float(distance):.2g})"
            )


def check_model(model: FallbackModel, dtype: torch.dtype, device: str) -> None:
    """Checks a loaded model over a few pages of its own."""
    shape = model.architecture
    count = 2 * CHECK_TOKENS // CHECK_PAGE * len(shape.slices.windows)
    kv = torch.zeros(shape.pages_shape(count, CHECK_PAGE), dtype=dtype, device=device)
    FallbackRunner(model, kv).check_against_transformers()

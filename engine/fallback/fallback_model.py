"""A model of transformers with the engine's interface: forward over pages, then logits; its steps,
and the check that it answers as transformers alone does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging as transformers_logging

from baton.core.errors import InvalidCheckpoint, UnsupportedModel
from baton.engine.checkpoint import checkpoint_files
from baton.engine.fallback.attention_interface import NAME, PagedStep, PassingCache, running
from baton.engine.fallback.inspection import expect_no_padding, first_line, read_class
from baton.engine.model_choice import FallbackArchitecture
from baton.engine.runner import StepRunner
from baton.engine.step import ChunkInputs

CHECK_PAGE, CHECK_TOKENS = 4, 24
CHECK_CHUNKS = ((0, 9), (9, 23), (23, 24))
"""How the checked sequence is cut: two chunks, and a single token."""

TOLERANCE = {torch.float32: 1e-3}
"""Largest relative distance of logits; other dtypes have HALF_TOLERANCE."""
HALF_TOLERANCE = 0.1


class FallbackModel:
    """Splits a causal language model into body and head: many rows run, few need logits.

    The model's own `forward` runs for both, so that everything a class does around its body and
    its head is done. The body's output is kept the first time, and returned the second time.
    """

    def __init__(self, model: Any, architecture: FallbackArchitecture) -> None:
        self.architecture = architecture
        self._model = model
        self._body = model.get_submodule(architecture.body)
        self._forward_body = self._body.forward
        self._hidden: Tensor | None = None  # [1, n, hidden], the head's input
        # Makes the body's last output with other rows.
        self._rebuild: Callable[..., Any] = BaseModelOutputWithPast
        self._body.forward = self._run_body

    def forward(
        self, tokens: Tensor, positions: Tensor, samples: Tensor, step: PagedStep
    ) -> Tensor:
        """tokens and positions [T] -> the head's input for rows `samples`, [n, hidden]."""
        with running(step):
            self._call(tokens, positions)
        found, self._hidden = self._hidden, None
        assert found is not None, "the body has run"
        return found[0, samples]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] of `forward`'s output, on the host."""
        self._hidden = hidden[None]
        try:
            rows = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._call(rows, rows).logits[0]
        finally:
            self._hidden = None
        return logits.cpu()

    def reference_logits(self, tokens: Tensor) -> Tensor:
        """[T, vocabulary] of one sequence as transformers computes it without pages, on the
        host."""
        self._body.forward = self._forward_body
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(NAME)
            self._body.forward = self._run_body
        return logits.cpu()

    def _call(self, tokens: Tensor, positions: Tensor) -> Any:
        return self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            past_key_values=PassingCache(),
            use_cache=True,
        )

    def _run_body(self, *inputs: Any, **named: Any) -> Any:
        if self._hidden is None:
            output = self._forward_body(*inputs, **named)
            self._hidden = output.last_hidden_state
            kind: Callable[..., Any] = type(output)
            self._rebuild = partial(kind, **{**output, "last_hidden_state": None})
            return self._rebuild(last_hidden_state=self._hidden[:, :0])
        return self._rebuild(last_hidden_state=self._hidden)


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
            torch.cuda.synchronize(self._device)  # pages may be pushed when this returns
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
        """Raises UnsupportedModel unless a sequence that runs over pages, in chunks and beside
        another one, has the logits that transformers computes for it whole and alone. Overwrites
        pages."""
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


def load_fallback(
    folder: Path, architecture: FallbackArchitecture, dtype: torch.dtype, device: str
) -> FallbackModel:
    """Loads the weights through transformers, from safetensors only, and checks the model."""
    checkpoint_files(folder)
    transformers_logging.disable_progress_bar()
    config, model_class = read_class(folder)
    try:
        model, loading = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported below
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (RuntimeError, SafetensorError, KeyError) as error:
        # Such as for sizes that no memory holds, a damaged file or an incomplete index.
        raise InvalidCheckpoint(
            f"transformers cannot load {architecture.class_name}: {first_line(error)}"
        ) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if named := sorted(map(str, loading[problem])):
            raise InvalidCheckpoint(
                f"{architecture.class_name}: {problem.replace('_', ' ')}: {named[0]}"
                f" ({len(named)} such tensors)"
            )
    expect_no_padding(model)
    loaded = FallbackModel(model.eval().to(device), architecture)
    try:
        _check_model(loaded, dtype, device)
    except torch.OutOfMemoryError:
        raise  # another device may have room
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedModel(
            f"transformers cannot run {architecture.class_name} with this config:"
            f" {first_line(error)}"
        ) from error
    return loaded


def _check_model(model: FallbackModel, dtype: torch.dtype, device: str) -> None:
    """Checks a loaded model over a few pages of its own."""
    shape = model.architecture
    count = 2 * CHECK_TOKENS // CHECK_PAGE * len(shape.slices.windows)
    kv = torch.zeros(shape.pages_shape(count, CHECK_PAGE), dtype=dtype, device=device)
    FallbackRunner(model, kv).check_against_transformers()

"""A model of transformers with the engine's interface: forward over pages, then logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging as transformers_logging

from baton.core.errors import InvalidCheckpoint
from baton.engine.checkpoint import checkpoint_files
from baton.engine.fallback.attention_interface import NAME, PagedStep, PassingCache, running
from baton.engine.fallback.inspection import read_class
from baton.engine.model_choice import FallbackArchitecture


class FallbackModel:
    """Splits a causal language model where its head begins: many rows run, few are wanted.

    Its own `forward` runs both times, so whatever a class does around its body and its head is
    done: the body's output is kept the first time, and given back the second.
    """

    def __init__(self, model: Any, architecture: FallbackArchitecture) -> None:
        self.architecture = architecture
        self._model = model
        self._body = model.get_submodule(architecture.body)
        self._forward_body = self._body.forward
        self._hidden: Tensor | None = None  # [1, n, hidden], what the head is to read
        # The body's last output, for other rows.
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
        """[T, vocabulary] of one sequence as transformers computes it alone, on the host."""
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


def load_fallback(
    folder: Path, architecture: FallbackArchitecture, dtype: torch.dtype, device: str
) -> FallbackModel:
    """Loads the weights through transformers, from safetensors alone."""
    checkpoint_files(folder)
    transformers_logging.disable_progress_bar()
    config, model_class = read_class(folder)
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
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if named := sorted(map(str, loading[problem])):
            raise InvalidCheckpoint(
                f"{architecture.class_name}: {problem.replace('_', ' ')}: {named[0]}"
                f" ({len(named)} such tensors)"
            )
    return FallbackModel(model.eval().to(device), architecture)

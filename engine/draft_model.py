"""The draft model, which runs beside the main one on a decode worker: checks that both fit, and
loads the draft's engine, which has pages of its own.

The draft is never split: rank 0 runs all of it. On a GPU the main model leaves room for it
(engine/gpu/draft_room.py). This module does not import torch, since a configuration is checked
before the cluster starts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core import model_store
from baton.core.config import Config
from baton.core.errors import InvalidConfig, ModelNotFound, NotServed
from baton.core.tokenizer_files import tokenizer_text
from baton.engine.model_choice import (
    AnyArchitecture,
    check_kv_dtype,
    check_quantization,
    read_model,
    stored_shape,
)

if TYPE_CHECKING:
    from baton.engine.engine import Engine
    from baton.engine.gpu.device import GpuSettings

FIELD = "draft_model"

MOST_BEHIND = 16
"""The most tokens of a request that a draft computes in the round of its next guess; more are
computed as a prompt."""

MOST_ROWS = 128
"""The most rows of the draft's recorded steps on a GPU."""


def find_draft(config: Config, model: Path, *, weights: bool) -> Path | None:
    """Returns the draft model's folder, None if none is configured. Raises an error if it does not
    fit the model in the folder `model`."""
    if (config.speculation == "draft") != bool(config.draft_model):
        raise InvalidConfig(
            "speculation draft needs a draft_model, and nothing else uses one", field=FIELD
        )
    if not config.draft_model:
        return None
    folder = locate_draft(config, weights=weights)
    architecture = read_model(folder, "auto", config.max_context)
    check_quantization(config.quantization, architecture, config.device, config.dtype)
    check_kv_dtype(config.kv_dtype, architecture, config.device)
    check_vocabulary(model, folder)
    return folder


def locate_draft(config: Config, *, weights: bool) -> Path:
    try:
        return model_store.locate(config.draft_model, weights=weights)
    except ModelNotFound as error:
        raise ModelNotFound(error.message, field=FIELD) from error


def check_vocabulary(model: Path, draft: Path) -> None:
    """Raises InvalidConfig unless a token id means the same to both. An embedding may have more
    rows than its tokenizer has tokens."""
    here, there = _tokens(model), _tokens(draft)
    if not here or not there:
        _check_sizes(model, draft, tokenizers=bool(here or there))
        return
    if here == there:
        return
    token = min(
        token for token in here.keys() | there.keys() if here.get(token) != there.get(token)
    )
    raise InvalidConfig(
        f"draft_model {draft.name} has another vocabulary than the model: token {token} is"
        f" {there.get(token)!r} there and {here.get(token)!r} here",
        field=FIELD,
    )


def _check_sizes(model: Path, draft: Path, *, tokenizers: bool) -> None:
    """Compares models without tokenizers, which take token ids only."""
    here, there = (read_model(folder, "auto").vocabulary_size for folder in (model, draft))
    if tokenizers or here != there:
        raise InvalidConfig(
            f"draft_model {draft.name} has another vocabulary than the model: {there} tokens, not"
            f" {here}, or a tokenizer that the other lacks",
            field=FIELD,
        )


def load_draft(config: Config, folder: Path, main: Engine) -> Engine:
    """Loads the draft's engine, which the calling thread owns. `config` is settled."""
    architecture = read_model(folder, "auto", config.max_context)
    device = main.kv.device
    page = page_bytes(architecture, config, main.dtype.itemsize, device.type)
    if 0 < config.draft_kv_memory < page:
        raise InvalidConfig(
            f"{config.draft_kv_memory} bytes hold no page of the draft model: one takes {page}",
            field="draft_kv_memory",
        )
    engine = type(main).load(
        folder,
        dtype=main.dtype,
        device=str(device),
        page_size=config.page_size,
        kv_memory=config.draft_kv_memory or main.pool.total // main.pool.slices * page,
        max_context=config.max_context and min(config.max_context, architecture.context_length),
        random_weights=config.weights == "random",
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        gpu=draft_settings(config, main.gpu),
    )
    if main.pool.root is not None:  # no other worker gets keys of the draft's pages
        engine.pool.root = bytes.fromhex(engine.fingerprint)
    return engine


def draft_settings(config: Config, main: GpuSettings) -> GpuSettings:
    """The settings of the draft's steps, from those of the main model's."""
    return replace(
        main,
        max_batch=min(config.decode.max_batch, MOST_ROWS),
        chunk_tokens=config.decode.chunk_tokens,
        share=1.0,
        adapters=None,
        guesses=True,
        short_chunk=MOST_BEHIND,
        draft=None,
    )


def _tokens(folder: Path) -> dict[int, str]:
    """Returns the tokens of a model's tokenizer by id; empty without a tokenizer."""
    try:
        text = tokenizer_text(folder)
    except NotServed:
        return {}
    from tokenizers import Tokenizer

    return {number: token for token, number in Tokenizer.from_str(text).get_vocab().items()}


def page_bytes(architecture: AnyArchitecture, config: Config, itemsize: int, device: str) -> int:
    """The bytes of one page of tokens, over all slices. `itemsize` is that of the model's dtype."""
    shape = stored_shape(architecture.pages_shape(1, config.page_size), config.kv_dtype, device)
    size = itemsize if config.kv_dtype == "auto" else 1
    return math.prod(shape) * size * len(architecture.slices.windows)

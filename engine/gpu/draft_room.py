"""The memory that the main model leaves for the draft model on a GPU.

The main model takes all memory that is left, before the draft is loaded: a worker that begins with
prefill loads it after a role switch. So the draft's memory is computed from its shape.
"""

from __future__ import annotations

from pathlib import Path

import torch

from baton.core.config import Config
from baton.core.errors import InvalidConfig
from baton.engine.architecture import Architecture
from baton.engine.draft_model import FIELD, draft_settings, page_bytes
from baton.engine.gpu.device import DraftRoom, GpuSettings
from baton.engine.gpu.start import runner_bytes
from baton.engine.model_choice import read_model
from baton.engine.random_tensors import TensorSizes
from baton.engine.weights import load_model


def draft_room(config: Config, folder: Path, dtype: torch.dtype, main: GpuSettings) -> DraftRoom:
    """The room for the draft in `folder`. `config` is settled; `main` is the main model's."""
    shape = read_model(folder, "auto", config.max_context)
    if not isinstance(shape, Architecture):
        raise InvalidConfig("a draft model runs natively on a GPU, or not at all", field=FIELD)
    settings = draft_settings(config, main)
    context = min(shape.context_length, config.max_context or shape.context_length)
    steps = runner_bytes(settings, shape, context, config.page_size, dtype)
    pages = config.draft_kv_memory
    page = 0 if pages else page_bytes(shape, config, dtype.itemsize, "cuda")
    return DraftRoom(_weight_bytes(shape, dtype) + steps + pages, page)


def _weight_bytes(shape: Architecture, dtype: torch.dtype) -> int:
    """The bytes of the weights before quantization, which runs layer by layer."""
    sizes = TensorSizes()
    load_model(sizes, shape, dtype, "meta")
    return sizes.bytes

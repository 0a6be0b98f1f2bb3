"""LoRA adapters of tiny models, made and run by PEFT: the oracle."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from baton.core.types import Adapter
from baton.engine.adapter_pool import AdapterPool
from baton.engine.engine import Engine

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
"""Of latent attention, beside what makes queries."""


def save_adapter(
    base: PreTrainedModel, folder: Path, *, seed: int = 0, **settings: object
) -> PreTrainedModel:
    """Writes an adapter with random weights, large enough to change most answers; returns the base
    with it, as PEFT runs it."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL, **settings})
    model = get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder))
    return PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()


def change_adapter_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Replaces tensors by the ends of their names, with dots as underscores; None removes them."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for end, tensor in changes.items():
        name = next(name for name in tensors if name.replace(".", "_").endswith(end))
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


def open_pool(engine: Engine, slots: int = 8, folder: Path = Path("/")) -> AdapterPool:
    return engine.open_adapters(slots, [str(folder)], lambda: None)


def load_now(pool: AdapterPool, *adapters: Adapter) -> None:
    """Waits until they are loaded."""
    ended = threading.Event()
    pool._wake = ended.set
    for adapter in adapters:
        while not pool.want(adapter, kept=()):
            ended.wait(10)
            ended.clear()
            if failed := pool.settle():
                raise next(iter(failed.values()))

"""Draft models for tests: how often they are right is the test's choice, and so is what they cost.

A draft is the model itself, or it with noise on its weights. A model with further layers that add
nothing answers as before, to the bit, and costs more than its draft.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculating import Loop
from tiny_models import change_config

from baton.core.online_fit import OnlineFit
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import Speculation
from baton.decode_worker.step_cost import CPU, StepCost
from baton.engine.engine import Engine

WEIGHTS = "model.safetensors"
ADDING = ("o_proj.weight", "down_proj.weight")
"""What a layer adds to its rows is a product with one of these."""


class FixedCost(OnlineFit):
    """Learns nothing, so that what is decided by it does not depend on the machine."""

    def note(self, features: object, seconds: float) -> None:
        pass


class FixedStepCost(StepCost):
    """A step of the main model, by the same rule."""

    def __init__(self, step: float = 1e-2, row: float = 1e-4) -> None:
        super().__init__()
        self.block, self._known = 1, None
        self._set_fit(FixedCost([*(step + row * rows for rows in CPU.rows), step], 1.0))
        self._most_measured = CPU.rows[-1]


def main_cost() -> FixedStepCost:
    return FixedStepCost()


def draft_cost(step: float = 1e-4) -> FixedCost:
    return FixedCost((1e-6, step, 1e-5, 1e-6), 1.0)


class Drafting(Loop):
    """A decode worker's loop with a draft model, whose costs are fixed."""

    def __init__(self, engine: Engine, draft: Engine, step: float = 1e-4, **limits: int) -> None:
        vocabulary = engine.architecture.vocabulary_size
        self.drafts = Drafts(draft, vocabulary, 64, cost=draft_cost(step))
        speculation = Speculation(self.drafts, main_cost(), runs_ahead=engine.runs_ahead)
        super().__init__(engine, speculation, **limits)

    def step(self) -> bool:
        more = super().step()
        if not more:
            assert not self.drafts.check(), "all pages of the draft came back"
        return more


def save_draft(model: Path, folder: Path, noise: float = 0.0) -> Path:
    """Of a model whose weights are one file."""
    shutil.copytree(model, folder)
    if noise:
        generator = torch.Generator().manual_seed(5)
        tensors = load_file(folder / WEIGHTS)
        for name, tensor in tensors.items():
            changed = torch.randn(tensor.shape, generator=generator) * noise * tensor.std()
            tensors[name] = tensor + changed.to(tensor.dtype)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def deepen(model: Path, layers: int) -> None:
    """Adds layers that are copies of the last one but add nothing."""
    tensors = load_file(model / WEIGHTS)
    config = json.loads((model / "config.json").read_text())
    count = config["num_hidden_layers"]
    last = f"model.layers.{count - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        for number in range(count, count + layers):
            copy = tensors[name].clone()
            if name.endswith(ADDING):
                copy.zero_()
            tensors[name.replace(last, f"model.layers.{number}.")] = copy
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    kinds = config.get("layer_types")
    longer = [*kinds, *kinds[-1:] * layers] if kinds else None
    change_config(model, num_hidden_layers=count + layers, layer_types=longer)

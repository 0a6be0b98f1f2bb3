"""The embedded model cut to its first layers: its tokenizer at a fraction of its cost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from baton.core.model_store import WEIGHT_FILE, embedded_folder

LAYERS = 3


def save_shallow_model(folder: Path) -> Path:
    """Writes the model's folder, which must not exist, and returns it."""
    source = embedded_folder()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(WEIGHT_FILE))
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    weights = load_file(source / WEIGHT_FILE)
    save_file(
        {name: each for name, each in weights.items() if _is_kept(name)}, folder / WEIGHT_FILE
    )
    return folder


def _is_kept(name: str) -> bool:
    layer = re.search(r"layers\.(\d+)\.", name)
    return layer is None or int(layer[1]) < LAYERS

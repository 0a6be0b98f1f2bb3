"""Tensors of a checkpoint, each read once, straight into its final buffer.

Files are memory-mapped: the copy into the buffer is the first to touch a tensor's bytes, and a
rank touches only its part. On a CPU that copy also converts the type; to a GPU it goes through
a little pinned memory (engine/gpu/upload.py), and the GPU converts and rearranges. Tensors of a
GGUF file and quantized ones are dequantized one at a time, in float32, rounded once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.core.errors import InvalidCheckpoint, ModelNotFound
from baton.core.gguf_model import GgufWeights
from baton.core.model_store import (
    GRIDS_FILE,
    WEIGHT_FILE,
    WEIGHT_INDEX,
    check_pulled,
    weight_files,
)
from baton.engine.architecture import Split
from baton.engine.gpu.upload import Upload
from baton.engine.quantization_config import Quantization
from baton.engine.quantized_tensor import OpenFile, QuantizedTensor, QuantizedWeight, join_parts
from baton.kernels.exact_codes import FineGrid, fine_grid
from baton.kernels.packed import Grid

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_MOST_HEADER_BYTES = 1 << 26
_SAMPLES = 16
_SAMPLE_BYTES = 4096

Arrange = Callable[[Tensor], Tensor]


class Cut(NamedTuple):
    """Parts (start, size) of a tensor's dimension of size `whole`, joined."""

    dimension: int
    whole: int
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def of_rank(cls, split: Split, dimension: int, sizes: tuple[int, ...]) -> Cut:
        """A rank's `sizes` of parts that all ranks share evenly. A single rank has one part, which
        saves the copy that joins parts."""
        if split.size == 1:
            sizes = (sum(sizes),)
        parts, start = [], 0
        for size in sizes:
            parts.append((start + split.rank * size, size))
            start += split.size * size
        return cls(dimension, start, tuple(parts))

    def whole_shape(self, joined: Tensor) -> torch.Size:
        shape = list(joined.shape)
        shape[self.dimension] = self.whole
        return torch.Size(shape)

    def of(self, tensor: Tensor | QuantizedTensor) -> Tensor:
        found = [tensor.narrow(self.dimension, *part) for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=self.dimension)

    def indices(self, dimension: int, size: int) -> Tensor:
        """The indices of a dimension of `size` that the parts have."""
        if dimension != self.dimension:
            return torch.arange(size)
        return torch.cat([torch.arange(start, start + some) for start, some in self.parts])

    def of_grid(self, grid: FineGrid) -> FineGrid | None:
        """None if a part does not end with a group."""
        each = grid.group if self.dimension else 1
        if any(start % each or size % each for start, size in self.parts):
            return None
        parts = tuple((start // each, size // each) for start, size in self.parts)
        return grid.changed(Cut(self.dimension, self.whole // each, parts).of)


class Checkpoint:
    """The tensors of the model in `folder`; each can be copied once."""

    def __init__(
        self,
        folder: Path,
        progress: Callable[[float], None] | None = None,
        upload: Upload | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """`upload` copies to targets on a device; `finish` closes it."""
        opened = _open_all(checkpoint_files(folder))
        stored: dict[str, OpenFile] = {}
        for file in opened:
            stored |= dict.fromkeys(file.keys(), file)
        self._remaining: dict[str, OpenFile | QuantizedWeight] = (
            join_parts(stored, quantization) if quantization else dict(stored)
        )
        self._quantized = {
            name for name, file in self._remaining.items() if isinstance(file, QuantizedWeight)
        }
        self._folder = folder
        self._count = len(self._remaining)
        self._progress = progress
        self._upload = upload

    @functools.cached_property
    def _grids(self) -> dict[str, FineGrid]:
        """Read when they are asked for: only float32 weights on CPUs need them."""
        return _stored_grids(self._folder / GRIDS_FILE)

    def __contains__(self, name: str) -> bool:
        """True if the tensor can still be copied."""
        return name in self._remaining

    def grid(self, name: str, cut: Cut) -> Grid | None:
        """The grid of the tensor's part `cut`, before it is copied; None if it is not quantized to
        integers in blocks of inputs."""
        file = self._remaining.get(name)
        if not isinstance(file, QuantizedWeight):
            return None
        tensor = file.get_tensor(name)
        if tensor.shape[cut.dimension] != cut.whole:
            return None  # `copy` refuses it
        return tensor.grid(*(cut.indices(index, size) for index, size in enumerate(tensor.shape)))

    def fine_grid(self, name: str, cut: Cut) -> FineGrid | None:
        """The grid of the codes that the tensor's part `cut` is dequantized from, before it is
        copied; None if it is not known."""
        file = self._remaining.get(name)
        if isinstance(file, QuantizedWeight):
            grid = self.grid(name, cut)
            return grid and fine_grid(grid)
        found = file.grid(name) if isinstance(file, _GgufTensors) else self._grids.get(name)
        return found and cut.of_grid(found)

    def copy(
        self, name: str, target: Tensor, arrange: Arrange | None = None, cut: Cut | None = None
    ) -> None:
        """Copies the tensor `name`, or the part `cut`, rearranged, into `target`."""
        file = self._remaining.pop(name, None)
        if file is None:
            raise InvalidCheckpoint(f"tensor {name} is missing from the checkpoint")
        tensor = file.get_tensor(name)
        if tensor.dtype not in FLOATS:
            raise InvalidCheckpoint(f"tensor {name} is {tensor.dtype}, not a float")
        shape = cut.whole_shape(target) if cut else target.shape
        if tensor.shape != shape:
            raise InvalidCheckpoint(
                f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        if isinstance(tensor, QuantizedTensor):
            tensor = tensor._replace(dtype=target.dtype)
            tensor = (cut or Cut(0, shape[0], ((0, shape[0]),))).of(tensor)
        elif cut:
            tensor = cut.of(tensor)
        if tensor.dtype == torch.float64:  # torch rounds it to float32 first too
            tensor = tensor.float()
        self._copy(tensor, target, arrange)
        if self._progress:
            self._progress(1.0 - len(self._remaining) / self._count)

    def _copy(self, tensor: Tensor, target: Tensor, arrange: Arrange | None) -> None:
        if self._upload is None:
            target.copy_(arrange(tensor) if arrange else tensor)
            return
        self._upload.copy(tensor, target)
        if arrange:
            target.copy_(arrange(target))

    def skip(self, name: str) -> None:
        """Marks a tensor, if present, as not needed."""
        self._remaining.pop(name, None)

    def finish(self, not_run: tuple[str, ...] = ()) -> None:
        """Raises if a tensor is left over and its name has no prefix in `not_run`: then the model
        is not what its config says."""
        if self._upload is not None:
            self._upload.close()
        unused = sorted(
            name
            for name in self._remaining
            if not name.endswith(".inv_freq")
            and not name.startswith(not_run)
            and not self._is_empty_bias(name)
        )
        if unused:
            raise InvalidCheckpoint(
                f"config.json has no place for tensor {unused[0]} ({len(unused)} such tensors)"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Quantizers of GPTQ store a bias of zeros for layers without one."""
        module, _, part = name.rpartition(".")
        file = self._remaining[name]
        if part != "bias" or f"{module}.weight" not in self._quantized:
            return False
        return not isinstance(file, QuantizedWeight) and not file.get_tensor(name).any()


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of the model in `folder`: the only safetensors file, those its index names, or the
    parts of a GGUF file."""
    files = gguf_files(folder) or [folder / name for name in weight_files(folder)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelNotFound(f"{folder} lacks the weight file {missing[0]} (safetensors only)")
    for file in files:
        check_pulled(file)
    return files


def gguf_files(folder: Path) -> list[Path]:
    """The parts of a GGUF file; none where there are safetensors."""
    others = any((folder / name).is_file() for name in (WEIGHT_FILE, WEIGHT_INDEX))
    return [] if others else sorted(folder.glob("model*.gguf"))


def digest_files(files: list[Path]) -> bytes:
    """A digest of the files' sizes, headers and some of their bytes; reads little."""
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, size, _MOST_HEADER_BYTES)))
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()


def _stored_grids(file: Path) -> dict[str, FineGrid]:
    """By tensor, from scales and offsets in the rows of one tensor."""
    if not file.exists():
        return {}
    found = {}
    with _open(file) as opened:
        for name in sorted(opened.keys()):
            scales, offsets = opened.get_tensor(name).unbind()
            inputs = int(opened.metadata()[name])
            found[name] = FineGrid(scales, offsets, inputs // scales.shape[1])
    return found


class _GgufTensors:
    """Has the interface of an open safetensors file."""

    def __init__(self, files: list[Path]) -> None:
        self._weights = GgufWeights(files)

    def keys(self) -> list[str]:
        return self._weights.names

    def get_tensor(self, name: str) -> Tensor:
        # Torch needs writable memory, and unquantized values are in the mapped file.
        return torch.from_numpy(np.require(self._weights[name], requirements="W"))

    def grid(self, name: str) -> FineGrid | None:
        found = self._weights.grid(name)
        if found is None:
            return None
        scales, offsets = map(torch.from_numpy, found)
        return FineGrid(scales, offsets, self._weights.inputs(name) // scales.shape[1])


def _open_all(files: list[Path]) -> list[safe_open] | list[_GgufTensors]:
    if files[0].suffix == ".gguf":
        return [_GgufTensors(files)]
    return [_open(file) for file in files]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise InvalidCheckpoint(f"{file} is not a safetensors file: {error}") from error

"""Reads fields and tensors of GGUF files. Tensors are dequantized on access.

The format's own library takes many seconds to parse a header of 150,000 tokens, since each string
becomes several arrays. Here a field is decoded on access. The library dequantizes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from baton.core.errors import InvalidCheckpoint, UnsupportedModel
from baton.core.gguf_grids import grid_of_blocks
from baton.core.lfs_pointer import POINTER, is_lfs_pointer

Values = npt.NDArray[np.float32]
Field = TypeVar("Field", str, int, float, bool, list[str], list[int], list[float])

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_AT_ONCE = 1 << 22
"""Values dequantized at once, since the library needs as much memory again."""

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_BROKEN = (struct.error, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # in its file
    file: mmap.mmap

    @property
    def size(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return int(math.prod(self.shape) // block * size)

    def at(self, index: int) -> _Tensor:
        part = replace(self, shape=self.shape[1:])
        return replace(part, start=self.start + index * part.size)


class GgufFile:
    """The fields of a GGUF model's first file, and the tensors of all its files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._name = paths[0].name
        self._values: dict[str, Any] = {}  # of decoded fields
        headers = [_open(path) for path in paths]
        self._header = headers[0]
        self._tensors = {name: each for header in headers for name, each in header.tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._header.fields

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, as in torch."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def field(self, name: str, kind: type[Field], default: Field | None = None) -> Field:
        """Raises UnsupportedModel if the field is missing without a default, or of another type."""
        if name not in self:
            if default is None:
                raise UnsupportedModel(f"{self._name} has no field {name}")
            return default
        if name not in self._values:
            try:
                self._values[name] = self._header.value(*self._header.fields[name])
            except _BROKEN as error:
                raise InvalidCheckpoint(f"{self._name}: {name} is broken: {error}") from error
        value = self._values[name]
        expected = get_origin(kind) or kind
        if not isinstance(value, (int, float) if expected is float else expected):
            raise UnsupportedModel(f"{self._name}: {name} is not of type {expected.__name__}")
        return cast(Field, value)

    def tensor(self, name: str, index: int | None = None) -> Values:
        """A tensor's values, or those at an index of its first dimension."""
        tensor, rows = self._rows(name, index)
        if tensor.kind == GGMLQuantizationType.F32:
            return rows.view(np.float32).reshape(tensor.shape)
        values = np.empty((len(rows), tensor.shape[-1]), np.float32)
        step = max(1, _AT_ONCE // tensor.shape[-1])
        try:
            for row in range(0, len(rows), step):
                values[row : row + step] = dequantize(rows[row : row + step], tensor.kind)
        except NotImplementedError as error:
            raise UnsupportedModel(f"tensor {name} is {tensor.kind.name}: {error}") from error
        return values.reshape(tensor.shape)

    def grid(self, name: str, index: int | None = None) -> tuple[Values, Values] | None:
        """The scales and offsets of a tensor's codes, [rows, groups] each (gguf_grids.py)."""
        tensor, rows = self._rows(name, index)
        _, block = GGML_QUANT_SIZES[tensor.kind]
        found = grid_of_blocks(rows.reshape(-1, block), tensor.kind)
        return found and (found[0].reshape(len(rows), -1), found[1].reshape(len(rows), -1))

    def _rows(self, name: str, index: int | None) -> tuple[_Tensor, npt.NDArray[np.uint8]]:
        """A tensor, or that at an index of its first dimension, and its rows as bytes."""
        tensor = self._tensors[name]
        if index is not None:
            tensor = tensor.at(index)
        data = np.frombuffer(tensor.file, np.uint8, tensor.size, tensor.start)
        return tensor, data.reshape(math.prod(tensor.shape[:-1]), -1)


def _open(path: Path) -> _Header:
    try:
        return _Header(path)
    except _BROKEN as error:
        raise InvalidCheckpoint(f"{path} is not a whole GGUF file: {error}") from error


class _Header:
    """Parses one file up to its data."""

    def __init__(self, path: Path) -> None:
        if is_lfs_pointer(path):
            raise ValueError(f"it is {POINTER}")
        with path.open("rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        self._check_version()
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        self.fields: dict[str, tuple[int, int]] = {}  # name: (type, position)
        for _ in range(fields):
            # Any bytes may be the name of a field that is not used.
            name, kind = self._string("backslashreplace"), self._scalar("I")
            self.fields[name] = (kind, self._at)
            self._skip(kind)
        found = [self._tensor_info() for _ in range(tensors)]
        alignment = _ALIGNMENT
        if "general.alignment" in self.fields:
            alignment = self.value(*self.fields["general.alignment"])
        data = -(-self._at // alignment) * alignment
        self.tensors = {
            name: _Tensor(shape, kind, data + offset, self._file)
            for name, shape, kind, offset in found
        }
        end = max((each.start + each.size for each in self.tensors.values()), default=0)
        if end > len(self._file):
            raise ValueError(f"it has {len(self._file):,} of {end:,} bytes")

    def _check_version(self) -> None:
        version = self._scalar("I") if self._file[:4] == _MAGIC else 0
        if version.to_bytes(4, "big")[0] in _VERSIONS:
            raise ValueError("it is big-endian; convert it for this machine")
        if version not in _VERSIONS:
            raise ValueError(f"it is not GGUF of version {' or '.join(map(str, _VERSIONS))}")

    def value(self, kind: int, position: int) -> Any:
        """Decodes a field's value, whose bytes begin at `position`."""
        before, self._at = self._at, position
        try:
            return self._value(kind)
        finally:
            self._at = before

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._array()
        if item == _ARRAY:
            raise ValueError("it has arrays of arrays")
        if item in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            size = self._scalar("Q")
            self._at += size
        elif kind != _ARRAY:
            self._at += struct.calcsize(_SCALARS[kind])
        else:
            item, count = self._array()
            if item in _SCALARS:
                self._at += count * struct.calcsize(_SCALARS[item])
            else:
                for _ in range(count):
                    self._skip(item)

    def _array(self) -> tuple[int, int]:
        """The type and the number of an array's items."""
        return self._scalar("I"), self._scalar("Q")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        shape = self._unpack(f"<{self._scalar('I')}Q")
        kind = GGMLQuantizationType(self._scalar("I"))
        if math.prod(shape) == 0 or shape[0] % GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"tensor {name} has the shape {shape[::-1]}")
        return name, shape[::-1], kind, self._scalar("Q")

    def _string(self, errors: str = "strict") -> str:
        size = self._scalar("Q")
        self._at += size
        if self._at > len(self._file):
            raise ValueError("it ends within its header")
        return self._file[self._at - size : self._at].decode(errors=errors)

    def _scalar(self, code: str) -> Any:
        return self._unpack(f"<{code}")[0]

    def _unpack(self, code: str) -> tuple[Any, ...]:
        found = struct.unpack_from(code, self._file, self._at)
        self._at += struct.calcsize(code)
        return found

"""The scales and offsets in a GGUF tensor's blocks: weights are code * scale + offset."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K

Values = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]


def grid_of_blocks(blocks: Blocks, kind: Kind) -> tuple[Values, Values] | None:
    """blocks [n, bytes] -> scales and offsets, [n, groups of a block] each. None for a kind whose
    weights are no such codes, or that is not read here."""
    read = _READERS.get(kind)
    return read(blocks) if read else None


def _halves(blocks: Blocks, first: int) -> Values:
    """The float16 at a byte of each block, [n, 1]."""
    found: Values = np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16)
    return found.astype(np.float32)


def _scaled(blocks: Blocks) -> tuple[Values, Values]:
    scales = _halves(blocks, 0)
    return scales, np.zeros_like(scales)


def _with_least(blocks: Blocks) -> tuple[Values, Values]:
    return _halves(blocks, 0), _halves(blocks, 2)


def _in_eights(blocks: Blocks) -> tuple[Values, Values]:
    """Q4_K and Q5_K: eight groups of 32."""
    scales, least = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _halves(blocks, 0) * scales.astype(np.float32), -(
        _halves(blocks, 2) * least.astype(np.float32)
    )


def _in_sixteens(blocks: Blocks) -> tuple[Values, Values]:
    """Q6_K: sixteen groups of 16."""
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scales, np.zeros_like(scales)


_READERS: dict[Kind, Callable[[Blocks], tuple[Values, Values]]] = {
    Kind.Q4_0: _scaled,
    Kind.Q5_0: _scaled,
    Kind.Q8_0: _scaled,
    Kind.Q4_1: _with_least,
    Kind.Q5_1: _with_least,
    Kind.Q4_K: _in_eights,
    Kind.Q5_K: _in_eights,
    Kind.Q6_K: _in_sixteens,
}

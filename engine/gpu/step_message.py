"""A step as rank 0 sends it to the ranks that follow: 32-bit numbers.

Tokens are only placeholders there: those that rank 0 settles on its device are shared from
there (engine/gpu/runner.py), since the host may not know them yet.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from baton.engine.gpu.batch import StepArrays
from baton.engine.gpu.prompt_attention import LongChunk
from baton.engine.gpu.staging import Ints

HEAD = 6


class Step(NamedTuple):
    arrays: StepArrays
    pages: Ints  # [n, 2]: places in the page table, and what to put there
    wanted: Ints  # [n], the rows that the last layer is run for


def encode(step: Step) -> bytes:
    """How many rows, blocks, long chunks, decoding rows, pages and wanted rows; then all."""
    arrays = step.arrays
    head = [len(arrays.tokens), len(arrays.blocks), len(arrays.long), arrays.decoding]
    head += [len(step.pages), len(step.wanted)]
    for chunk in arrays.long:
        head += [chunk.first, chunk.count, chunk.start, chunk.slot]
    parts = (np.array(head, np.int32), arrays.joined(), step.pages.ravel(), step.wanted)
    return np.concatenate(parts).astype(np.int32, copy=False).tobytes()


def decode(message: bytes) -> Step:
    numbers = np.frombuffer(message, np.int32).copy()
    rows, blocks, long, decoding, pages, wanted = numbers[:HEAD].tolist()
    sizes = [HEAD, 4 * long, rows, rows, rows, rows, 4 * blocks, 2 * pages, wanted]
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    tokens, slots, positions, stores = parts[2:6]
    arrays = StepArrays(
        tokens=tokens,
        slots=slots,
        positions=positions,
        stores=stores,
        blocks=parts[6].reshape(-1, 4),
        long=[LongChunk(*chunk) for chunk in parts[1].reshape(-1, 4).tolist()],
        decoding=decoding,
    )
    return Step(arrays, parts[7].reshape(-1, 2), parts[8])

"""One step as arrays: its rows, what they read and where they store.

Rows are tokens: first one for each decoding sequence, then the chunks. A sequence with guesses is
a chunk, except in a step that only decodes: there blocks list its rows, which are attended together
(kernels/gpu/guess_attention.py). So are the few tokens of a sequence that a draft model is behind.

Rank 0 sends `StepMessage` to the other ranks, as 32-bit numbers. They ignore its tokens, since rank
0 shares the final ones from device to device (engine/gpu/runner.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.gpu.prompt_attention import LongChunk, is_long
from baton.engine.sequence import Sequence
from baton.engine.step import Plan, with_guesses
from baton.kernels.gpu.chunk_attention import BLOCK_QUERIES

INPUT_ROWS = 3
"""Rows of a step's inputs before the stores of each slice."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    rows: Ints  # [3 + slices, T]: tokens (-1: the one the step before sampled for this slot),
    # slots of the page table, positions, and the stores of each slice (page * page_size + offset)
    blocks: Ints  # [n, 4], see kernels/gpu/chunk_attention.py and guess_attention.py
    long: list[LongChunk]
    decoding: int  # rows that are the one new token of their sequence, or one of its guesses
    guesses: bool = False  # whether decoding rows include several of one sequence
    adapters: Ints | None = None  # [T], slots of the rows' adapters or -1; None: no row has one

    @property
    def count(self) -> int:
        return len(self.rows[0])

    @property
    def slots(self) -> Ints:
        slots: Ints = self.rows[1]
        return slots

    @property
    def only_decodes(self) -> bool:
        return self.decoding == self.count

    def joined(self) -> Ints:
        """All arrays, concatenated."""
        return np.concatenate((self.rows.ravel(), self.blocks.ravel()))

    def padded(self, rows: int, blocks: int, padding_slot: int) -> StepArrays:
        """Adds idle rows and blocks at the end."""
        if rows == self.count and blocks == len(self.blocks):
            return self
        count = rows - self.count
        slices = len(self.rows) - INPUT_ROWS
        more = blocks - len(self.blocks)
        idle = StepArrays.idle(count, more, padding_slot, slices, decodes=self.only_decodes)
        return StepArrays(
            rows=np.concatenate((self.rows, idle.rows), axis=1),
            blocks=np.concatenate((self.blocks, idle.blocks)),
            long=self.long,
            decoding=self.decoding + idle.decoding,
            guesses=self.guesses,
            adapters=None
            if self.adapters is None
            else np.pad(self.adapters, (0, count), constant_values=-1),
        )

    @classmethod
    def idle(
        cls, rows: int, blocks: int, padding_slot: int, slices: int, *, decodes: bool
    ) -> StepArrays:
        """A step that changes no page."""
        row = np.array([0, padding_slot, -1 if decodes else 0, *[-1] * slices], dtype=np.int32)
        return cls(
            rows=np.repeat(row[:, None], rows, axis=1),
            blocks=np.zeros((blocks, 4), dtype=np.int32),
            long=[],
            decoding=rows if decodes else 0,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step's arrays."""

    page_size: int
    decoding: int  # rows that are attended as decoding; more are chunks of one token
    long_chunks: bool  # whether long chunks are attended one by one
    slices: int
    recorded: int  # rows of the largest recorded step over prompts
    together: int = 1  # rows of a sequence with guesses that are attended together
    short: int = 1  # most tokens of a sequence, without guesses, in a step that only decodes


def step_arrays(
    plan: Plan, slots: list[int], limits: Limits, adapters: Ints | None = None
) -> StepArrays:
    """The arrays of one step. The plan is in the order of its rows."""
    page_size = limits.page_size
    chunks = with_guesses(plan)
    decoding = _decoding(plan, chunks, limits)
    if decoding == sum(chunks.values()):
        return _decoding_rows(plan, chunks, slots, limits, adapters)
    counts = np.asarray(list(chunks.values()), dtype=np.int32)
    starts = np.asarray([sequence.computed for sequence in plan], dtype=np.int32)
    firsts = np.cumsum(counts) - counts
    positions = np.repeat(starts - firsts.astype(np.int32), counts)
    positions += np.arange(len(positions), dtype=np.int32)
    blocks: list[tuple[int, int, int, int]] = []
    long: list[LongChunk] = []
    rows = zip(chunks.items(), slots, firsts, strict=True)
    for (sequence, count), slot, first in islice(rows, decoding, None):
        start = sequence.computed
        if limits.long_chunks and is_long(count, start, page_size, limits.recorded):
            long.append(LongChunk(int(first), count, start, slot))
        else:
            blocks += _blocks(int(first), start, count, slot)
    known = [token for chunk in plan.items() for token in _tokens(*chunk)]
    tokens = np.asarray(known, dtype=np.int32)
    row_slots = np.repeat(np.asarray(slots, dtype=np.int32), counts)
    offsets = positions % page_size
    stores = [
        np.concatenate([_pages(*chunk, number, page_size) for chunk in chunks.items()]) * page_size
        + offsets
        for number in range(limits.slices)
    ]
    return StepArrays(
        rows=np.stack((tokens, row_slots, positions, *stores)),
        blocks=np.asarray(blocks, dtype=np.int32).reshape(-1, 4),
        long=long,
        decoding=decoding,
        adapters=adapters,
    )


def _decoding_rows(
    plan: Plan, chunks: Plan, slots: list[int], limits: Limits, adapters: Ints | None
) -> StepArrays:
    """The arrays of a step that only decodes. It has few rows and leaves the host the least time:
    lists are faster than arrays."""
    size, guesses = limits.page_size, len(plan) < sum(chunks.values())
    rows: list[list[int]] = [[] for _ in range(INPUT_ROWS + limits.slices)]
    blocks: list[tuple[int, int, int, int]] = []
    for (sequence, count), length, slot in zip(plan.items(), chunks.values(), slots, strict=True):
        places = range(sequence.computed, sequence.computed + length)
        if guesses:
            blocks += _blocks(len(rows[0]), places.start, length, slot, limits.together)
        rows[0] += _tokens(sequence, count)
        rows[1] += [slot] * length
        rows[2] += places
        for stores, table in zip(rows[INPUT_ROWS:], sequence.lease.tables, strict=True):
            stores += [table[place // size] * size + place % size for place in places]
    return StepArrays(
        rows=np.array(rows, dtype=np.int32),
        blocks=np.array(blocks, dtype=np.int32).reshape(-1, 4),
        long=[],
        decoding=len(rows[0]),
        guesses=guesses,
        adapters=adapters,
    )


def _decoding(plan: Plan, chunks: Plan, limits: Limits) -> int:
    rows = sum(chunks.values())
    if len(plan) < rows <= limits.decoding and _is_short(plan, limits.short):
        return rows
    singles = min(sum(count == 1 for count in chunks.values()), limits.decoding)
    # A step that only decodes ends in logits. Embeddings need its hidden states: then the last row
    # is a chunk of one token.
    embeds = singles == len(plan) and any(sequence.pooled for sequence in plan)
    return singles - 1 if embeds else singles


def _is_short(plan: Plan, most: int) -> bool:
    """True if each chunk is one token, or up to `most` tokens that sample."""
    return all(
        count == 1 or (count <= most and sequence.samples(count) and not sequence.pooled)
        for sequence, count in plan.items()
    )


def _tokens(sequence: Sequence, count: int) -> list[int]:
    if sequence.computed >= len(sequence.tokens):
        return [-1]
    known = sequence.tokens[sequence.computed : sequence.computed + count]
    guesses = sequence.guesses if sequence.samples(count) else []
    return known + [-1] * (count - len(known)) + guesses


def _pages(sequence: Sequence, count: int, number: int, page_size: int) -> Ints:
    """The page of each of its next `count` tokens, in a table of its lease."""
    start, pages = sequence.computed, sequence.lease.tables[number]
    if count == 1:
        return np.asarray([pages[start // page_size]], dtype=np.int32)
    held = np.asarray(pages, dtype=np.int32)
    return held[np.arange(start, start + count) // page_size]


def _blocks(
    first: int, start: int, count: int, slot: int, size: int = BLOCK_QUERIES
) -> list[tuple[int, int, int, int]]:
    """Blocks of `size` rows each; the last one first, since it sees the most."""
    return [
        (first + offset, start + offset, min(size, count - offset), slot)
        for offset in reversed(range(0, count, size))
    ]


Ints = npt.NDArray[np.int32]


def upload(array: Ints, device: torch.device) -> Tensor:
    """Copies to the device in the order of its stream, without waiting.

    The page-locked memory is torch's: not reused before the copy has ended.
    """
    if not array.size:
        return torch.empty(array.shape, dtype=torch.int32, device=device)
    return _pinned(array, device).to(device, non_blocking=True)


def upload_into(target: Tensor, array: Ints) -> None:
    """The array [m] at the start of target [n], int32."""
    target[: array.size].copy_(_pinned(array, target.device), non_blocking=True)


def download(values: Tensor) -> Tensor:
    """Copies to host memory in the order of the stream, without waiting."""
    pinned = values.device.type == "cuda"
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
    return there.copy_(values, non_blocking=True)


def _pinned(array: Ints, device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


HEAD = 9


class StepMessage(NamedTuple):
    arrays: StepArrays
    pages: Ints  # [n, 2]: places in the page table, and their new pages
    wanted: Ints  # [n], the rows that the last layer computes


def encode_step(step: StepMessage) -> bytes:
    """A head, then all arrays. The head has counts: inputs of a row, rows, blocks, long chunks,
    decoding rows, pages, wanted rows, rows of adapters (0 if no row has one); then whether there
    are guesses."""
    arrays = step.arrays
    adapters = np.empty(0, np.int32) if arrays.adapters is None else arrays.adapters
    head = [*arrays.rows.shape, len(arrays.blocks), len(arrays.long), arrays.decoding]
    head += [len(step.pages), len(step.wanted), len(adapters), arrays.guesses]
    for chunk in arrays.long:
        head += [chunk.first, chunk.count, chunk.start, chunk.slot]
    rest = step.pages.ravel(), step.wanted, adapters
    parts = (np.array(head, np.int32), arrays.joined(), *rest)
    return np.concatenate(parts).astype(np.int32, copy=False).tobytes()


def decode_step(message: bytes) -> StepMessage:
    numbers = np.frombuffer(message, np.int32).copy()
    inputs, rows, blocks, long, decoding, pages, wanted, adapted, guesses = numbers[:HEAD].tolist()
    sizes = [HEAD, 4 * long, inputs * rows, 4 * blocks, 2 * pages, wanted, adapted]
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    arrays = StepArrays(
        rows=parts[2].reshape(inputs, -1),
        blocks=parts[3].reshape(-1, 4),
        long=[LongChunk(*chunk) for chunk in parts[1].reshape(-1, 4).tolist()],
        decoding=decoding,
        guesses=bool(guesses),
        adapters=parts[6] if adapted else None,
    )
    return StepMessage(arrays, parts[4].reshape(-1, 2), parts[5])

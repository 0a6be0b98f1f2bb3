"""Compiled attention of one query per sequence, directly over its pages.

A work item is one key head of one sequence, over at most SPLIT tokens, with as many of the
query heads that share it as registers hold. Its three passes keep their numbers in `scratch`:

    1. each token's address, and its score with each query, four tokens at a time
    2. the greatest score, the weights exp(score - greatest), and their sum
    3. the weighted sum of the values, as many of its vectors at a time as registers hold

Then the parts of each query are merged. Tokens are split by position alone: a result does not
depend on the batch, nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.ir_builder import (
    COUNT,
    LANES,
    POINTER,
    Arguments,
    Count,
    Floats,
    Function,
    Memory,
    exp,
    transposed,
)

SPLIT = 256
"""Tokens of a work item."""

WEIGHTS = SPLIT + LANES
"""Size of an item's weights for one query: vectors may reach past the last token."""

SUMS = 28
"""Vector registers that sums may take, of 32."""


LINE = 16
"""Numbers of a cache line."""

LEAST = -3e38
"""Less than any score."""


class AttentionArguments(ctypes.Structure):
    """Arguments of the compiled functions."""

    _fields_ = (
        ("queries", ctypes.c_void_p),  # [sequences, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # numbers from one sequence's to the next's
        ("cache", ctypes.c_void_p),  # the layer's keys of page 0
        ("page_stride", ctypes.c_int64),  # numbers from one page to the next
        ("tables", ctypes.c_void_p),  # [sequences, table_width], page ids, int64
        ("table_width", ctypes.c_int64),
        ("first", ctypes.c_void_p),  # [sequences], the first token of its pages that is seen, int64
        ("end", ctypes.c_void_p),  # [sequences], and the one after the last
        ("sequences", ctypes.c_int64),
        ("splits", ctypes.c_int64),  # of the longest sequence
        ("scratch", ctypes.c_void_p),  # [items, scratch_numbers()]
        ("parts", ctypes.c_void_p),  # [sequences, heads, splits, part_numbers()]
        ("out", ctypes.c_void_p),  # [sequences, heads, head_dim]
        ("items_claimed", ctypes.c_int64),  # 0 at first
    )


@dataclass(frozen=True)
class Heads:
    """The shape that code is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    @property
    def queries(self) -> int:
        """Query heads of an item: their scores with four tokens are SUMS registers at most."""
        group = self.heads // self.kv_heads
        return max(n for n in range(1, SUMS // LANES + 1) if group % n == 0)

    @property
    def vectors(self) -> int:
        """Vectors of each query's result that are summed at a time."""
        every = self.head_dim // LANES
        return max(n for n in range(1, SUMS // self.queries + 1) if every % n == 0)

    @property
    def token_stride(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def part_numbers(self) -> int:
        """A part: its weighted sum, then greatest score and sum of weights, each fourfold."""
        return self.head_dim + 2 * LANES

    @property
    def scratch_numbers(self) -> int:
        """An item's: a 64-bit place for each token, then weights for each query and token."""
        return 2 * SPLIT + self.queries * WEIGHTS


@functools.cache
def library(shape: Heads) -> Library:
    """The functions `attend`, which makes the parts, and `merge`."""
    module = ir.Module("attention")
    _attend(module, shape)
    _merge(module, shape)
    return Library(module)


def _attend(module: ir.Module, shape: Heads) -> None:
    passes = _scores(module, shape), _weights(module, shape), _values(module, shape)
    item = _item(module, shape, passes)
    code = Function(module, "attend", [POINTER], exported=True)
    structure = code.arguments[0]
    given = Arguments(structure, AttentionArguments)
    items = given.count("sequences") * (shape.heads // shape.queries) * given.count("splits")
    with code.claim(given.counter("items_claimed"), items) as index:
        code.call(item, structure, index)
    code.end()


def _item(module: ir.Module, shape: Heads, passes: tuple[Function, Function, Function]) -> Function:
    """(arguments, item)"""
    code = Function(module, "item", [POINTER, COUNT])
    structure, item = code.arguments
    given = Arguments(structure, AttentionArguments)
    splits, items_a_sequence = given.count("splits"), shape.heads // shape.queries
    split, rest = item % splits, item // splits
    head, sequence = rest % items_a_sequence * shape.queries, rest // items_a_sequence
    start = (split * SPLIT).at_least(given.counts("first").count(sequence))
    stop = ((split + 1) * SPLIT).at_most(given.counts("end").count(sequence))
    tokens = (stop - start).at_least(0)
    places = given.counts("scratch").from_(item * (shape.scratch_numbers // 2))
    weights = given.floats("scratch").from_(item * shape.scratch_numbers + 2 * SPLIT)
    kv_head = head // (shape.heads // shape.kv_heads)
    keys = given.floats("cache").from_(kv_head * shape.head_dim)
    values = keys.from_(shape.page_size * shape.token_stride)
    query = given.floats("queries").from_(
        sequence * given.count("query_stride") + head * shape.head_dim
    )
    table = given.counts("tables").from_(sequence * given.count("table_width"))
    _find_tokens(code, shape, table, given.count("page_stride"), start, tokens, places)
    part = given.floats("parts").from_(
        ((sequence * shape.heads + head) * splits + split) * shape.part_numbers
    )
    part_stride = splits * shape.part_numbers
    score, weigh, add = passes
    code.call(score, query, keys, places, tokens, weights)
    code.call(weigh, weights, tokens, part, part_stride)
    code.call(add, weights, values, places, tokens, part, part_stride)
    code.end()
    return code


def _find_tokens(
    code: Function,
    shape: Heads,
    table: Memory,
    page_stride: Count,
    start: Count,
    tokens: Count,
    places: Memory,
) -> None:
    """Stores each token's offset from the first token of page 0."""
    with code.loop(0, tokens) as index:
        token = start + index
        page, offset = table.count(token // shape.page_size), token % shape.page_size
        places.put_count(page * page_stride + offset * shape.token_stride, index)


def _scores(module: ir.Module, shape: Heads) -> Function:
    """Scaled products of queries and keys; past the last token, up to a multiple of four, that
    token's again: (queries, keys, places, tokens, scores [queries, WEIGHTS])"""
    code = Function(module, "scores", [POINTER, POINTER, POINTER, COUNT, POINTER])
    query, keys, places, tokens, scores = code.arguments
    places = Memory(code.builder, places.value, COUNT)
    with code.loop(0, tokens, step=LANES) as first:
        last = tokens - 1
        at = [keys.from_(places.count((first + lane).at_most(last))) for lane in range(LANES)]
        for key in at:
            _prefetch_value(shape, key)
        zeros = [code.zero()] * (shape.queries * LANES)
        with code.sum_loop(0, shape.head_dim, zeros, step=LANES) as (dim, sums):
            found = [key.vector(dim) for key in at]
            for head in range(shape.queries):
                q = query.vector(dim + head * shape.head_dim)
                for lane, key in enumerate(found):
                    index = head * LANES + lane
                    sums[index] = sums[index].plus_product(q, key)
        for head in range(shape.queries):
            of_four = _totals(sums[head * LANES : (head + 1) * LANES])
            scaled = of_four * (1 / math.sqrt(shape.head_dim))
            scores.put(scaled, first + head * WEIGHTS)
    code.end()
    return code


def _prefetch_value(shape: Heads, key: Memory) -> None:
    """The value of a key's token, for the third pass: rows are too far apart for the hardware's
    prefetcher."""
    for start in range(0, shape.head_dim, LINE):
        key.prefetch(shape.page_size * shape.token_stride + start)


def _totals(four: list[Floats]) -> Floats:
    """The sum of each of four vectors."""
    columns = transposed(four)
    return (columns[0] + columns[1]) + (columns[2] + columns[3])


def _weights(module: ir.Module, shape: Heads) -> Function:
    """Turns scores into weights, and notes the greatest score and the sum of the weights:
    (scores, tokens, part, part_stride)"""
    code = Function(module, "weights", [POINTER, COUNT, POINTER, COUNT])
    scores, tokens, part, part_stride = code.arguments
    for head in range(shape.queries):
        of_head = scores.from_(head * WEIGHTS)
        with code.sum_loop(0, tokens, [code.zero() + LEAST], step=LANES) as (token, greatest):
            greatest[0] = greatest[0].at_least(of_head.vector(token))
        top = greatest[0].greatest()
        with code.loop(0, tokens, step=LANES) as token:
            of_head.put(exp(of_head.vector(token) - top), token)
        of_head.put(code.zero(), tokens)
        with code.sum_loop(0, tokens, [code.zero()], step=LANES) as (token, sums):
            sums[0] = sums[0] + of_head.vector(token)
        notes = part.from_(part_stride * head + shape.head_dim)
        notes.put(top)
        notes.put(sums[0].total(), LANES)
    code.end()
    return code


def _values(module: ir.Module, shape: Heads) -> Function:
    """The weighted sums of values: (weights, values, places, tokens, part, part_stride)"""
    code = Function(module, "values", [POINTER, POINTER, POINTER, COUNT, POINTER, COUNT])
    weights, values, places, tokens, part, part_stride = code.arguments
    places = Memory(code.builder, places.value, COUNT)
    size = shape.vectors * LANES
    with code.loop(0, shape.head_dim, step=size) as start:
        zeros = [code.zero()] * (shape.queries * shape.vectors)
        with code.sum_loop(0, tokens, zeros) as (token, sums):
            value = values.from_(places.count(token) + start)
            shares = [weights.repeated(token + head * WEIGHTS) for head in range(shape.queries)]
            for vector in range(shape.vectors):
                numbers = value.vector(vector * LANES)
                for head, share in enumerate(shares):
                    index = head * shape.vectors + vector
                    sums[index] = sums[index].plus_product(numbers, share)
        for index, total in enumerate(sums):
            head, vector = divmod(index, shape.vectors)
            part.put(total, part_stride * head + start + vector * LANES)
    code.end()
    return code


def _merge(module: ir.Module, shape: Heads) -> None:
    """Every head's result from its parts."""
    code = Function(module, "merge", [POINTER], exported=True)
    given = Arguments(code.arguments[0], AttentionArguments)
    splits = given.count("splits")
    with code.loop(0, given.count("sequences") * shape.heads) as head:
        parts = given.floats("parts").from_(head * splits * shape.part_numbers)
        with code.sum_loop(0, splits, [code.zero() + LEAST]) as (split, greatest):
            note = parts.vector(split * shape.part_numbers + shape.head_dim)
            greatest[0] = greatest[0].at_least(note)
        with code.sum_loop(0, splits, [code.zero()]) as (split, total):
            notes = parts.from_(split * shape.part_numbers + shape.head_dim)
            share = exp(notes.vector() - greatest[0])
            notes.put(share)
            total[0] = total[0].plus_product(notes.vector(LANES), share)
        out = given.floats("out").from_(head * shape.head_dim)
        with code.loop(0, shape.head_dim, step=LANES) as dim:
            with code.sum_loop(0, splits, [code.zero()]) as (split, sums):
                part = parts.from_(split * shape.part_numbers)
                sums[0] = sums[0].plus_product(part.vector(dim), part.vector(shape.head_dim))
            out.put(sums[0] / total[0], dim)
    code.end()


class CompiledAttention:
    """Attention of one query per sequence over pages, for one shape of heads and pages."""

    def __init__(self, shape: Heads) -> None:
        self._shape = shape
        self._attend = library(shape).address("attend")
        self._merge = library(shape).address("merge")

    def __call__(
        self, query: Tensor, kv: Tensor, tables: Tensor, first: Tensor, end: Tensor, longest: int
    ) -> Tensor:
        """query [B, heads, head_dim], kv [page, 2, token, kv_head, dim], the rest as in DecodeReads
        -> [B, heads * head_dim]."""
        shape, batch, splits = self._shape, query.shape[0], -(-longest // SPLIT)
        items = batch * splits * (shape.heads // shape.queries)
        part_numbers = batch * shape.heads * splits * shape.part_numbers
        scratch, parts = compiler.scratch(items * shape.scratch_numbers, part_numbers)
        out = query.new_empty(batch, shape.heads * shape.head_dim)
        arguments = AttentionArguments(
            query.data_ptr(),
            query.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            tables.data_ptr(),
            tables.shape[1],
            first.data_ptr(),
            end.data_ptr(),
            batch,
            splits,
            scratch,
            parts,
            out.data_ptr(),
        )
        compiler.run(self._attend, arguments)
        compiler.run(self._merge, arguments, alone=True)
        return out


@functools.cache
def compiled_attention(
    heads: int, page_size: int, kv_heads: int, head_dim: int
) -> CompiledAttention | None:
    """None where there is no code for the shape."""
    if head_dim % LANES:
        return None
    return CompiledAttention(Heads(heads, kv_heads, head_dim, page_size))

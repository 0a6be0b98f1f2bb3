"""Compiled code for the part of attention that all queries share: some rows over one split.

A row is one query head at one position. It sees the tokens of its context in splits at fixed
positions, the multiples of SPLIT, and its parts are merged in their order. A split has three
passes over its tokens:

    1. each token's score with each row, four tokens at a time: sums over the lanes of a vector,
       then of those lanes (vectors.totals)
    2. the greatest score, the weights exp(score - greatest), and their sum: over the vectors in
       order, where a token's lane is its position modulo the lanes, then of the lanes
    3. the sum of the weighted values, token by token

None of these sums depends on how many rows are computed together, nor on which tokens of the
split other rows see: what a row does not see has weight 0, which changes no sum. So the same
position has the same result as a single query and within a prompt's chunk of any size, in
pages of any size, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.vectors import QUAD, Floats, constant, exp_of_negative, totals

SPLIT = 256
"""Tokens whose weights share one greatest score; a multiple of any number of lanes."""

LINE = 64
"""Bytes of a cache line."""

LEAST = -3e38
"""Less than any score."""


@dataclass(frozen=True)
class Heads:
    """The shape that code is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    element: ir.Type  # of queries, keys, values and results
    lanes: int
    registers: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of a tile: their scores with four tokens fill the registers."""
        return (self.registers - 4) // QUAD - (self.registers > 16)

    def vectors(self, rows: int) -> int:
        """Vectors of each row's result that are summed at a time."""
        every = self.head_dim // self.lanes
        at_most = max(1, (self.registers - 4) // rows)
        return max(n for n in range(1, at_most + 1) if every % n == 0)

    @property
    def token_stride(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def token_numbers(self) -> int:
        """All queries of a token."""
        return self.heads * self.head_dim

    @property
    def part_numbers(self) -> int:
        """A part: its weighted sum, then greatest score and sum of weights, each in all lanes."""
        return self.head_dim + 2 * self.lanes


@dataclass(frozen=True)
class ContextSplit:
    """What rows of one key head read of one split."""

    keys: Memory  # of the head, in page 0
    values: Memory
    places: Memory  # [tokens], offsets from there
    tokens: Count


@dataclass(frozen=True)
class PageTable:
    """Where a sequence's tokens are."""

    table: Memory  # page ids
    stride: Count  # numbers from one page to the next
    start: Count  # the position of the table's first token


@dataclass(frozen=True)
class _Step:
    """Some tokens of a split, for some rows."""

    row: Count  # the first
    rows: Count
    places: Memory
    tokens: Count
    weights: Memory  # of the first row and token


class Tiles:
    """The functions of one module that compute parts, for 1 to shape.rows rows."""

    def __init__(self, module: ir.Module, shape: Heads) -> None:
        self._module, self._shape = module, shape
        self._weigh = self._weights()
        counts = range(1, shape.rows + 1)
        self._score = [self._scores(rows) for rows in counts]
        self._add = [self._values(rows) for rows in counts]

    def make_parts(
        self,
        code: Function,
        rows: Count,
        memory: dict[str, Memory],
        split: ContextSplit,
        parts: Memory,
        part_stride: Count | int,
        step: int,
    ) -> None:
        """The parts of all rows. The memory has their queries [rows, head_dim], bounds [rows, 2],
        the first token that a row sees and the one after its last, and weights [rows, SPLIT].
        `step` tokens at a time are read for all rows; sums go on in order."""
        with self._steps(code, rows, memory, split, step) as at:
            queries = memory["queries"].from_(at.row * self._shape.head_dim)
            given = (queries, split.keys, at.places, at.tokens, at.weights)
            self._dispatch(code, at.rows, self._score, given)
        with code.loop(0, rows) as row:
            bounds = memory["bounds"].of(COUNT)
            first, end = bounds.count(row * 2), bounds.count(row * 2 + 1)
            tokens = self._tokens_of_tile(bounds, rows, row)
            weights = memory["weights"].from_(row * SPLIT)
            code.call(self._weigh, weights, tokens, first, end, parts.from_(row * part_stride))
        with self._steps(code, rows, memory, split, step) as at:
            target = parts.from_(at.row * part_stride)
            added = (at.weights, split.values, at.places, at.tokens, target, part_stride)
            self._dispatch(code, at.rows, self._add, added)

    @contextmanager
    def _steps(
        self,
        code: Function,
        rows: Count,
        memory: dict[str, Memory],
        split: ContextSplit,
        step: int,
    ) -> Iterator[_Step]:
        """Each tile of rows, within each step of tokens."""
        shape = self._shape
        with (
            code.loop(0, split.tokens, step=step) as token,
            code.loop(0, rows, step=shape.rows) as row,
        ):
            seen = self._tokens_of_tile(memory["bounds"].of(COUNT), rows, row) - token
            with code.when(seen.compare(">", 0)):
                weights = memory["weights"].from_(row * SPLIT + token)
                places, count = split.places.from_(token), (rows - row).at_most(shape.rows)
                yield _Step(row, count, places, seen.at_most(step), weights)

    def _tokens_of_tile(self, bounds: Memory, rows: Count, row: Count) -> Count:
        """How many tokens the rows of a row's tile read: the last one sees the most."""
        size = self._shape.rows
        last = ((row // size + 1) * size).at_most(rows)
        return bounds.count(last * 2 - 1)

    @staticmethod
    def _dispatch(
        code: Function, rows: Count, functions: list[Function], given: tuple[Any, ...]
    ) -> None:
        """Calls the function for this many rows."""
        for count, function in enumerate(functions, start=1):
            with code.when(rows.compare("==", count)):
                code.call(function, *given)

    def _scores(self, rows: int) -> Function:
        """Scaled products of queries and keys; past the last token, up to a multiple of four, that
        token's again: (queries, keys, places, tokens, scores)"""
        shape, types = self._shape, [POINTER, POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, f"scores_{rows}", types, lanes=shape.lanes)
        query, keys, places, tokens, scores = code.arguments
        keys, places = keys.of(shape.element), places.of(COUNT)
        with code.loop(0, tokens, step=QUAD) as first:
            last = tokens - 1
            at = [keys.from_(places.count((first + each).at_most(last))) for each in range(QUAD)]
            for key in at:
                self._prefetch_value(key)
            zeros = [code.zero()] * (rows * QUAD)
            with code.sum_loop(0, shape.head_dim, zeros, step=shape.lanes) as (dim, sums):
                self._add_products(query, at, dim, rows, sums)
            for row in range(rows):
                scaled = totals(sums[row * QUAD : (row + 1) * QUAD]) * shape.head_dim**-0.5
                scores.in_lanes(QUAD).put(scaled, first + row * SPLIT)
        code.end()
        return code

    def _add_products(
        self, query: Memory, keys: list[Memory], dim: Count, rows: int, sums: list[Floats]
    ) -> None:
        """The fewer of queries and keys stay in registers."""
        of_rows = [query.from_(dim + row * self._shape.head_dim) for row in range(rows)]
        if rows < QUAD:
            held = [row.vector() for row in of_rows]
            for token, key in enumerate(keys):
                k = key.vector(dim)
                for row, q in enumerate(held):
                    at = row * QUAD + token
                    sums[at] = sums[at].plus_product(q, k)
            return
        held = [key.vector(dim) for key in keys]
        for row, memory in enumerate(of_rows):
            q = memory.vector()
            for token, k in enumerate(held):
                at = row * QUAD + token
                sums[at] = sums[at].plus_product(q, k)

    def _prefetch_value(self, key: Memory) -> None:
        """The value of a key's token, for the third pass: rows are too far apart for the
        hardware's prefetcher."""
        size = 4 if key.element == ir.FloatType() else 2
        for start in range(0, self._shape.head_dim, LINE // size):
            key.prefetch(self._shape.page_size * self._shape.token_stride + start)

    def _weights(self) -> Function:
        """Turns a row's scores into weights, 0 for tokens it does not see, and begins its part with
        the greatest score and the sum of the weights: (scores, tokens, first, end, part)"""
        shape, types = self._shape, [POINTER, COUNT, COUNT, COUNT, POINTER]
        code = Function(self._module, "weights", types, lanes=shape.lanes)
        scores, tokens, first, end, part = code.arguments
        vectors = (tokens + shape.lanes - 1) // shape.lanes * shape.lanes
        for start, stop in ((0, first), (end, vectors)):
            with code.loop(start, stop) as token:
                scores.in_lanes(1).put(constant(code.builder, LEAST, 1), token)
        least = code.zero() + LEAST
        with code.sum_loop(0, vectors, [least], step=shape.lanes) as (token, greatest):
            greatest[0] = greatest[0].at_least(scores.vector(token))
        top = greatest[0].greatest()
        with code.sum_loop(0, vectors, [code.zero()], step=shape.lanes) as (token, sums):
            score = scores.vector(token)
            weight = exp_of_negative(score - top).where(score.above(LEAST / 2), code.zero())
            scores.put(weight, token)
            sums[0] = sums[0] + weight
        with code.loop(0, shape.head_dim, step=shape.lanes) as at:
            part.put(code.zero(), at)
        notes = part.from_(shape.head_dim)
        notes.put(top)
        notes.put(sums[0].total(), shape.lanes)
        code.end()
        return code

    def _values(self, rows: int) -> Function:
        """Adds weighted values to parts: (weights, values, places, tokens, parts, part_stride)"""
        shape, types = self._shape, [POINTER, POINTER, POINTER, COUNT, POINTER, COUNT]
        code = Function(self._module, f"values_{rows}", types, lanes=shape.lanes)
        weights, values, places, tokens, parts, part_stride = code.arguments
        values, places, vectors = values.of(shape.element), places.of(COUNT), shape.vectors(rows)
        with code.loop(0, shape.head_dim, step=vectors * shape.lanes) as start:
            places_of_sums = [
                part_stride * row + start + vector * shape.lanes
                for row in range(rows)
                for vector in range(vectors)
            ]
            known = [parts.vector(at) for at in places_of_sums]
            with code.sum_loop(0, tokens, known) as (token, sums):
                value = values.from_(places.count(token) + start)
                shares = weights.from_(token)
                self._add_values(value, shares, rows, vectors, sums)
            for at, total in zip(places_of_sums, sums, strict=True):
                parts.put(total, at)
        code.end()
        return code

    def _add_values(
        self, value: Memory, weights: Memory, rows: int, vectors: int, sums: list[Floats]
    ) -> None:
        """One token's. The fewer of values and weights stay in registers."""
        of_token = [value.from_(vector * self._shape.lanes) for vector in range(vectors)]
        of_rows = [weights.from_(row * SPLIT) for row in range(rows)]
        if rows < vectors:
            shares = [each.repeated() for each in of_rows]
            for vector, memory in enumerate(of_token):
                numbers = memory.vector()
                for row, share in enumerate(shares):
                    at = row * vectors + vector
                    sums[at] = sums[at].plus_product(numbers, share)
            return
        held = [memory.vector() for memory in of_token]
        for row, memory in enumerate(of_rows):
            share = memory.repeated()
            for vector, numbers in enumerate(held):
                at = row * vectors + vector
                sums[at] = sums[at].plus_product(numbers, share)


class Merging:
    """The functions of one module that merge a row's parts, one after another, and end with its
    result. What is merged so far has the form of a part."""

    def __init__(self, module: ir.Module, shape: Heads) -> None:
        self._module, self._shape = module, shape
        self.begin, self.add, self.finish = self._begin(), self._add(), self._finish()

    def _begin(self) -> Function:
        """(merged)"""
        code = Function(self._module, "begin", [POINTER], lanes=self._shape.lanes)
        (merged,) = code.arguments
        with code.loop(0, self._shape.part_numbers, step=self._shape.lanes) as at:
            merged.put(code.zero(), at)
        merged.put(code.zero() + LEAST, self._shape.head_dim)
        code.end()
        return code

    def _add(self) -> Function:
        """(merged, part)"""
        shape = self._shape
        code = Function(self._module, "merge_part", [POINTER, POINTER], lanes=shape.lanes)
        merged, part = code.arguments
        known, found = merged.vector(shape.head_dim), part.vector(shape.head_dim)
        greatest = known.at_least(found)
        kept, added = exp_of_negative(known - greatest), exp_of_negative(found - greatest)
        merged.put(greatest, shape.head_dim)
        weight_sum = shape.head_dim + shape.lanes
        for start, stop in ((0, shape.head_dim), (weight_sum, weight_sum + shape.lanes)):
            with code.loop(start, stop, step=shape.lanes) as at:
                merged.put((merged.vector(at) * kept).plus_product(part.vector(at), added), at)
        code.end()
        return code

    def _finish(self) -> Function:
        """(merged, out)"""
        shape = self._shape
        code = Function(self._module, "finish", [POINTER, POINTER], lanes=shape.lanes)
        merged, out = code.arguments
        total = merged.vector(shape.head_dim + shape.lanes)
        with code.loop(0, shape.head_dim, step=shape.lanes) as at:
            out.of(shape.element).put(merged.vector(at) / total, at)
        code.end()
        return code


def find_tokens(
    code: Function,
    shape: Heads,
    pages: PageTable,
    begin: Count,
    first: Count,
    split: ContextSplit,
) -> None:
    """Stores the places of the split's tokens, which are at positions from `begin`; before
    `first`, that token's."""
    with code.loop(0, split.tokens) as index:
        token = (begin + index).at_least(first) - pages.start
        page, offset = pages.table.count(token // shape.page_size), token % shape.page_size
        split.places.put_count(page * pages.stride + offset * shape.token_stride, index)


def copy_query(code: Function, shape: Heads, source: Memory, target: Memory) -> None:
    """One row's query, as float32."""
    with code.loop(0, shape.head_dim, step=shape.lanes) as dim:
        target.put(source.vector(dim), dim)

"""Compiled code for the part of attention that all queries share: some rows over one split.

A row is one query head at one position. Its context is cut into splits at multiples of SPLIT, and
the parts that these give are merged in order. A split takes three passes over its tokens:

    1. each token's score with each row: a sum in each lane of a vector, then over the lanes
       (vectors.totals); or on tile registers, 32 numbers at a time
    2. the highest score, the weights exp(score - highest), and their sum: over the vectors in
       order, where a token's lane is its position modulo the lanes, then over the lanes
    3. the sum of the weighted values, token by token; or on tile registers, 32 tokens at a time,
       from a position that is a multiple of 32

If keys and values are int8 codes, passes 1 and 3 multiply codes, and pass 2 applies the scales:
it multiplies scores by the scales of keys and, after summing the weights, weights by the scales of
values. Codes of four bits are first copied as decoded numbers, one split at a time.

None of these sums depends on how many rows are computed together, nor on which tokens of the
split other rows see: tokens that a row does not see have weight 0, which changes no sum. So a
position has the same result as a single query and within a prompt's chunk of any size, in
pages of any size, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from baton.kernels.cpu.attention_products import products_of
from baton.kernels.cpu.attention_shape import (
    SPLIT,
    WEIGHTS_STRIDE,
    ContextSplit,
    Heads,
    PageTable,
    Step,
)
from baton.kernels.cpu.attention_weights import weights_code
from baton.kernels.cpu.half_byte_heads import take_numbers
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.vectors import FLOAT, exp_of_negative


class Tiles:
    """The functions of one module that compute parts."""

    def __init__(self, module: ir.Module, shape: Heads) -> None:
        self._module, self._shape = module, shape
        self._weigh = {rows: weights_code(module, shape, rows) for rows in shape.rows_weighed}
        self._products = products_of(module, shape.multiplied)
        self._copy_scales = self._scales() if shape.scaled else None
        self._unpack = self._unpacking() if shape.unpacked else None

    def make_parts(
        self,
        code: Function,
        rows: Count,
        memory: dict[str, Memory],
        split: ContextSplit,
        step: int,
    ) -> None:
        """Computes the parts of all rows.

        The memory has queries [rows, head_dim], bounds [rows, 2] (the first token that a row sees
        and the one after its last), weights and parts. All rows read `step` tokens before the next
        ones; sums stay in order.
        """
        if self._unpack:
            split = self._unpacked(code, memory, split, self._unpack)
        self._products.lay_out(code, memory, split)
        if self._copy_scales:
            for place, heads in enumerate((split.keys, split.values)):
                target = memory["scales"].from_(place * SPLIT)
                code.call(self._copy_scales, heads, split.places, split.tokens, target)
        with code.loop(0, rows, step=self._shape.rows_at_once) as first:
            last = (first + self._shape.rows_at_once).at_most(rows)
            self._parts_of(code, (first, last), rows, memory, split, step)

    def _parts_of(
        self,
        code: Function,
        some: tuple[Count, Count],
        rows: Count,
        memory: dict[str, Memory],
        split: ContextSplit,
        step: int,
    ) -> None:
        """Computes the parts of some of the rows, whose weights take the place of those before."""
        memory = memory | {"weights": memory["weights"].from_(some[0] * -WEIGHTS_STRIDE)}
        with self._steps(code, some, rows, memory, split, step, self._shape.rows_scored) as at:
            self._products.scores(code, at, memory, split)
        self._make_weights(code, some, rows, memory)
        with self._steps(code, some, rows, memory, split, step, self._shape.rows) as at:
            self._products.values(code, at, memory, split)

    def _make_weights(
        self, code: Function, some: tuple[Count, Count], rows: Count, memory: dict[str, Memory]
    ) -> None:
        """Computes the weights of some of the rows."""
        start, last = some
        for count, weigh in self._weigh.items():
            stop = start + (last - start) // count * count
            with code.loop(start, stop, step=count) as row:
                bounds = memory["bounds"].of(COUNT)
                tokens = self._tokens_of_tile(bounds, rows, row, self._shape.rows)
                part = memory["parts"].from_(row * self._shape.part_numbers)
                scores = memory["weights"].from_(row * WEIGHTS_STRIDE)
                given = (scores, tokens, bounds.from_(row * 2), part, memory["scales"])
                code.call(weigh, *given)
            start = stop

    def _unpacked(
        self, code: Function, memory: dict[str, Memory], split: ContextSplit, unpack: Function
    ) -> ContextSplit:
        """The split with decoded copies of its keys and values."""
        kind, copies = self._shape.operand, []
        for name, heads in (("copied keys", split.keys), ("copied values", split.values)):
            copies.append(memory[name].of(kind))
            code.call(unpack, heads, split.places, split.tokens, memory[name])
        places = memory["copied places"].of(COUNT)
        with code.loop(0, split.tokens) as token:
            places.put_count(token * self._shape.head_dim, token)
        return ContextSplit(copies[0], copies[1], places, split.tokens, split.rows)

    def _unpacking(self) -> Function:
        """Decodes a split's keys or values: (keys or values, places, tokens, copies)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "unpack", types, lanes=shape.lanes)
        heads, places, tokens, copies = code.arguments
        heads, places = heads.of(shape.stored), places.of(COUNT)
        with code.loop(0, tokens) as token:
            target = copies.of(shape.operand).from_(token * shape.head_dim)
            take_numbers(code, heads.from_(places.count(token)), shape.head_dim, target)
        code.end()
        return code

    @contextmanager
    def _steps(
        self,
        code: Function,
        some: tuple[Count, Count],
        rows: Count,
        memory: dict[str, Memory],
        split: ContextSplit,
        step: int,
        size: int,
    ) -> Iterator[Step]:
        """Loops over steps of tokens and, in each, over tiles of `size` rows."""
        with (
            code.loop(0, split.tokens, step=step) as token,
            code.loop(*some, step=size) as row,
        ):
            seen = self._tokens_of_tile(memory["bounds"].of(COUNT), rows, row, size) - token
            with code.when(seen.compare(">", 0)):
                yield Step(row, (rows - row).at_most(size), token, seen.at_most(step))

    @staticmethod
    def _tokens_of_tile(bounds: Memory, rows: Count, row: Count, size: int) -> Count:
        """How many tokens the rows of a row's tile read: as many as its last row sees."""
        last = ((row // size + 1) * size).at_most(rows)
        return bounds.count(last * 2 - 1)

    def _scales(self) -> Function:
        """Copies the scales of a split's keys or values: (keys or values, places, tokens,
        scales)"""
        types = [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "scales", types, lanes=1)
        heads, places, tokens, scales = code.arguments
        heads, places = heads.of(self._shape.stored), places.of(COUNT)
        with code.loop(0, tokens) as token:
            scale = heads.from_(places.count(token) + self._shape.head_dim).of(FLOAT)
            scales.put(scale.vector(), token)
        code.end()
        return code


class Merging:
    """The functions of one module that merge a row's parts in order and compute its result. The
    merged parts are kept in the form of a part."""

    def __init__(self, module: ir.Module, shape: Heads) -> None:
        self._module, self._shape = module, shape
        self.begin, self.add, self.finish = self._begin(), self._add(), self._finish()

    def _begin(self) -> Function:
        """Starts with the sink, an additional score of a token without a value: (merged, sink)"""
        shape = self._shape
        code = Function(self._module, "begin", [POINTER, POINTER], lanes=shape.lanes)
        merged, sink = code.arguments
        with code.loop(0, shape.value_dim, step=shape.lanes) as at:
            merged.put(code.zero(), at)
        merged.put(sink.repeated(), shape.value_dim)
        merged.put(code.zero() + 1.0, shape.value_dim + shape.lanes)
        code.end()
        return code

    def _add(self) -> Function:
        """(merged, part)"""
        shape = self._shape
        code = Function(self._module, "merge_part", [POINTER, POINTER], lanes=shape.lanes)
        merged, part = code.arguments
        known, found = merged.vector(shape.value_dim), part.vector(shape.value_dim)
        greatest = known.at_least(found)
        kept, added = exp_of_negative(known - greatest), exp_of_negative(found - greatest)
        merged.put(greatest, shape.value_dim)
        weight_sum = shape.value_dim + shape.lanes
        for start, stop in ((0, shape.value_dim), (weight_sum, weight_sum + shape.lanes)):
            with code.loop(start, stop, step=shape.lanes) as at:
                merged.put((merged.vector(at) * kept).plus_product(part.vector(at), added), at)
        code.end()
        return code

    def _finish(self) -> Function:
        """(merged, out)"""
        shape = self._shape
        code = Function(self._module, "finish", [POINTER, POINTER], lanes=shape.lanes)
        merged, out = code.arguments
        total = merged.vector(shape.value_dim + shape.lanes)
        with code.loop(0, shape.value_dim, step=shape.lanes) as at:
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
    """Stores the places of the split's tokens, which are at positions from `begin` on. Tokens
    before `first` get its place."""
    with code.loop(0, split.tokens) as index:
        token = (begin + index).at_least(first) - pages.start
        page, offset = pages.table.count(token // shape.page_size), token % shape.page_size
        split.places.put_count(page * pages.stride + offset * shape.token_stride, index)


def copy_query(code: Function, shape: Heads, source: Memory, target: Memory) -> None:
    """One row's query."""
    with code.loop(0, shape.head_dim, step=shape.lanes) as dim:
        target.put(source.vector(dim), dim)

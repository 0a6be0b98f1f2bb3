"""Products of attention: scores of queries with keys, and weighted sums of values.

VectorProducts computes both with vectors and reads keys and values in place, except for many rows,
whose keys are laid out first (attention_columns.py). TileProducts is for bfloat16 on tile registers
(amx.py), where keys and values are the weights of a product: they are laid out as such once per
split. Both multiply int8 codes as they are (attention_tile.py).

    scores     [rows, head_dim] x [head_dim, tokens], 16 rows and 64 tokens or 32 and 32 at a time
    values     [rows, tokens] x [tokens, value_dim], 32 tokens at a time
"""

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import ir

from baton.kernels.cpu import amx
from baton.kernels.cpu.attention_columns import ColumnScores
from baton.kernels.cpu.attention_shape import (
    MANY_ROWS,
    WEIGHTS_STRIDE,
    ContextSplit,
    Heads,
    Step,
    clamped_places,
    prefetch_key,
    prefetch_value,
)
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.vectors import (
    BFLOAT16,
    FLOAT,
    QUAD,
    Floats,
    paired,
    totals,
    transposed,
)

SUMS = 4
"""Number of tile registers for sums."""

TOKENS_AHEAD = 16
"""How many tokens ahead a single query's keys are prefetched into the L1 cache."""


class VectorProducts:
    """Functions for 1 to shape.rows rows."""

    def __init__(self, module: ir.Module, shape: Heads) -> None:
        self._module, self._shape = module, shape
        counts = range(1, shape.rows + 1)
        self._score = [self._scores(rows) for rows in counts]
        self._add = [self._values(rows) for rows in counts]
        self._columns = ColumnScores(module, shape) if shape.columns else None
        if shape.copies_values:
            self._copy_values, self._add_copied = self._copying(), self._values(shape.rows, True)

    def lay_out(self, code: Function, memory: dict[str, Memory], split: ContextSplit) -> None:
        """For many rows: lays out keys, and copies values that are not float32."""
        if self._columns:
            with code.when(split.rows.compare(">=", MANY_ROWS)):
                self._columns.lay_out(code, memory, split)
                if self._shape.copies_values:
                    given = (split.values, split.places, split.tokens, memory["values"])
                    code.call(self._copy_values, *given)

    def scores(
        self, code: Function, at: Step, memory: dict[str, Memory], split: ContextSplit
    ) -> None:
        """Stores products of queries and keys in memory["weights"]."""
        if not self._columns:
            self._scores_in_place(code, at, memory, split)
            return
        with code.when(split.rows.compare(">=", MANY_ROWS)):
            self._columns.scores(code, at, memory)
        with code.when(split.rows.compare("<", MANY_ROWS)):
            self._scores_in_place(code, at, memory, split)

    def _scores_in_place(
        self, code: Function, at: Step, memory: dict[str, Memory], split: ContextSplit
    ) -> None:
        """Computes scores with keys read from their pages."""
        queries = memory["queries"].from_(at.row * self._shape.head_dim)
        scores = memory["weights"].from_(at.row * WEIGHTS_STRIDE + at.token)
        given = (queries, split.keys, split.places.from_(at.token), at.tokens, scores)
        self._dispatch(code, at.rows, self._score, given)

    def values(
        self, code: Function, at: Step, memory: dict[str, Memory], split: ContextSplit
    ) -> None:
        """Adds weighted values to memory["parts"]."""
        weights = memory["weights"].from_(at.row * WEIGHTS_STRIDE + at.token)
        parts = memory["parts"].from_(at.row * self._shape.part_numbers)
        places = split.places.from_(at.token)
        given = (weights, split.values, places, at.tokens, parts)
        if not self._shape.copies_values:
            self._dispatch(code, at.rows, self._add, given)
            return
        with code.when(split.rows.compare(">=", MANY_ROWS)):
            copies = memory["values"].from_(at.token * self._shape.value_dim)
            code.call(self._add_copied, weights, copies, places, at.tokens, parts)
        with code.when(split.rows.compare("<", MANY_ROWS)):
            self._dispatch(code, at.rows, self._add, given)

    @staticmethod
    def _dispatch(
        code: Function, rows: Count, functions: list[Function], given: tuple[Any, ...]
    ) -> None:
        """Calls the function for this many rows."""
        for count, function in enumerate(functions, start=1):
            with code.when(rows.compare("==", count)):
                code.call(function, *given)

    def _scores(self, rows: int) -> Function:
        """Products of queries and keys; the last token is repeated up to a multiple of four:
        (queries, keys, places, tokens, scores)"""
        shape, types = self._shape, [POINTER, POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, f"scores_{rows}", types, lanes=shape.lanes)
        query, keys, places, tokens, scores = code.arguments
        keys, places = keys.of(shape.stored), places.of(COUNT)
        with code.loop(0, tokens, step=QUAD) as first:
            last = tokens - 1
            at = [keys.from_(places.count((first + each).at_most(last))) for each in range(QUAD)]
            for key in at:
                prefetch_value(shape, key)
            if rows <= shape.group:  # more rows would prefetch the same keys again and again
                for each in range(TOKENS_AHEAD, TOKENS_AHEAD + QUAD):
                    prefetch_key(shape, keys.from_(places.count((first + each).at_most(last))))
            zeros = [code.zero()] * (rows * QUAD)
            with code.sum_loop(0, shape.head_dim, zeros, step=shape.lanes) as (dim, sums):
                self._add_products(query, at, dim, rows, sums)
            for row in range(rows):
                of_row = totals(sums[row * QUAD : (row + 1) * QUAD])
                scores.in_lanes(QUAD).put(of_row, first + row * WEIGHTS_STRIDE)
        code.end()
        return code

    def _add_products(
        self, query: Memory, keys: list[Memory], dim: Count, rows: int, sums: list[Floats]
    ) -> None:
        """Keeps queries or keys in registers, whichever are fewer."""
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

    def _copying(self) -> Function:
        """Copies a split's values as float32: (values, places, tokens, copies)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "copy_values", types, lanes=shape.lanes)
        values, places, tokens, copies = code.arguments
        with code.loop(0, tokens) as token:
            value = values.of(shape.stored).from_(places.of(COUNT).count(token))
            for dim in range(0, shape.value_dim, shape.lanes):
                copies.put(value.vector(dim), token * shape.value_dim + dim)
        code.end()
        return code

    def _values(self, rows: int, copied: bool = False) -> Function:
        """Adds weighted values to parts: (weights, values, places, tokens, parts). Copied values
        are contiguous, and parts of rows beyond the last are then meaningless."""
        shape, types = self._shape, [POINTER, POINTER, POINTER, COUNT, POINTER]
        name = "copied_values" if copied else f"values_{rows}"
        code = Function(self._module, name, types, lanes=shape.lanes)
        weights, values, places, tokens, parts = code.arguments
        values = values if copied else values.of(shape.stored)
        places, vectors = places.of(COUNT), shape.vectors(rows)
        with code.loop(0, shape.value_dim, step=vectors * shape.lanes) as start:
            places_of_sums = [
                start + (row * shape.part_numbers + vector * shape.lanes)
                for row in range(rows)
                for vector in range(vectors)
            ]
            known = [parts.vector(at) for at in places_of_sums]
            with code.sum_loop(0, tokens, known) as (token, sums):
                place = token * shape.value_dim if copied else places.count(token)
                value = values.from_(place + start)
                shares = weights.from_(token)
                self._add_values(value, shares, rows, vectors, sums)
            for at, total in zip(places_of_sums, sums, strict=True):
                parts.put(total, at)
        code.end()
        return code

    def _add_values(
        self, value: Memory, weights: Memory, rows: int, vectors: int, sums: list[Floats]
    ) -> None:
        """Adds one token's weighted values. Keeps values or weights in registers, whichever are
        fewer."""
        of_token = [value.from_(vector * self._shape.lanes) for vector in range(vectors)]
        of_rows = [weights.from_(row * WEIGHTS_STRIDE) for row in range(rows)]
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


class TileProducts:
    """Functions for 16 rows. Results of rows beyond the last are meaningless."""

    def __init__(self, module: ir.Module, shape: Heads) -> None:
        self._module, self._shape = module, shape
        self._lay_out_keys, self._lay_out_values = self._keys_code(), self._values_code()
        self._score = {tiles: self._score_code(tiles) for tiles in (1, 2)}
        self._add = self._add_code()

    def lay_out(self, code: Function, memory: dict[str, Memory], split: ContextSplit) -> None:
        """Lays out keys and values in memory["keys"] and memory["values"]."""
        given = (split.places, split.tokens)
        code.call(self._lay_out_keys, split.keys, *given, memory["keys"])
        code.call(self._lay_out_values, split.values, *given, memory["values"])

    def scores(
        self, code: Function, at: Step, memory: dict[str, Memory], split: ContextSplit
    ) -> None:
        """Stores products of queries and keys in memory["weights"]."""
        size = self._shape.head_dim
        queries = memory["queries"].from_(at.row * size)
        keys = memory["keys"].of(BFLOAT16).from_(at.token * size)
        scores = memory["weights"].from_(at.row * WEIGHTS_STRIDE + at.token)
        for tiles, how in ((1, "<="), (2, ">")):
            with code.when(at.rows.compare(how, amx.HALF)):
                code.call(self._score[tiles], queries, keys, at.tokens, scores)

    def values(
        self, code: Function, at: Step, memory: dict[str, Memory], split: ContextSplit
    ) -> None:
        """Adds weighted values to memory["parts"]."""
        weights = memory["weights"].from_(at.row * WEIGHTS_STRIDE).of(BFLOAT16).from_(at.token)
        values = memory["values"].of(BFLOAT16).from_(at.token * self._shape.value_dim)
        parts = memory["parts"].from_(at.row * self._shape.part_numbers)
        code.call(self._add, weights, values, at.tokens, parts)

    def _keys_code(self) -> Function:
        """Lays out 16 tokens at a time, by pairs of each 32 of their numbers: (keys, places,
        tokens, laid out)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "lay_out_keys", types, lanes=amx.LANES)
        keys, places, tokens, out = code.arguments
        with code.loop(0, tokens, step=amx.HALF) as first:
            at = clamped_places(keys.of(shape.stored), places, first, tokens, amx.HALF)
            for key in at:
                prefetch_value(shape, key)
            with code.loop(0, shape.head_dim, step=amx.INPUTS) as dim:
                target = out.from_(first * (shape.head_dim // 2) + dim * (amx.HALF // 2))
                pairs = transposed([_pairs(key.from_(dim)) for key in at])
                for pair, of_tokens in enumerate(pairs):
                    target.put(of_tokens, pair * amx.HALF)
        code.end()
        return code

    def _values_code(self) -> Function:
        """Lays out 32 tokens at a time, as pairs of tokens for each 16 of their numbers; the last
        token is repeated: (values, places, tokens, laid out)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "lay_out_values", types, lanes=amx.LANES)
        values, places, tokens, out = code.arguments
        blocks = (tokens + amx.INPUTS - 1) // amx.INPUTS
        with code.loop(0, blocks * amx.INPUTS, step=2) as first:
            low, high = clamped_places(values.of(shape.stored), places, first, tokens, 2)
            block = out.from_(first // amx.INPUTS * (amx.HALF * shape.value_dim))
            with code.loop(0, shape.value_dim, step=amx.HALF) as dim:
                pairs = paired(low.vector(dim), high.vector(dim))
                block.put(pairs, dim * amx.HALF + first % amx.INPUTS * (amx.HALF // 2))
        code.end()
        return code

    def _score_code(self, count: int) -> Function:
        """Scores of `count` tiles of rows: (queries, keys, tokens, scores)"""
        size, types = self._shape.head_dim, [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, f"scores_{count}", types, lanes=amx.LANES)
        queries, keys, tokens, scores = code.arguments
        queries, keys, tiles = queries.of(BFLOAT16), keys.of(BFLOAT16), amx.TileCode(code)
        of_rows = [queries.from_(tile * (amx.HALF * size)) for tile in range(count)]
        with code.loop(0, tokens, step=SUMS // count * amx.HALF) as first:
            columns = [first + place * amx.HALF for place in range(SUMS // count)]
            for register in range(SUMS):
                tiles.zero(register)
            blocks = [keys.from_(column * size) for column in columns]
            amx.add_products(code, tiles, of_rows, 2 * size, size, blocks, amx.HALF)
            for register, (tile, column) in enumerate(product(range(count), columns)):
                target = scores.from_(column + tile * (amx.HALF * WEIGHTS_STRIDE))
                tiles.store(register, target, 4 * WEIGHTS_STRIDE)
        code.end()
        return code

    def _add_code(self) -> Function:
        """(weights, values, tokens, parts)"""
        size, stride = self._shape.value_dim, 4 * self._shape.part_numbers
        types = [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "values", types, lanes=amx.LANES)
        weights, values, tokens, parts = code.arguments
        weights, values, tiles = weights.of(BFLOAT16), values.of(BFLOAT16), amx.TileCode(code)
        for start in range(0, size, SUMS * amx.HALF):
            columns = range(start, min(size, start + SUMS * amx.HALF), amx.HALF)
            for register, column in enumerate(columns):
                tiles.load(register, parts.from_(column), stride)
            blocks = [values.from_(column * amx.INPUTS) for column in columns]
            amx.add_products(code, tiles, [weights], 4 * WEIGHTS_STRIDE, tokens, blocks, size)
            for register, column in enumerate(columns):
                tiles.store(register, parts.from_(column), stride)
        code.end()
        return code


def products_of(module: ir.Module, shape: Heads) -> VectorProducts | TileProducts:
    return TileProducts(module, shape) if shape.amx else VectorProducts(module, shape)


def prefetch_keys(code: Function, shape: Heads, split: ContextSplit) -> None:
    """Prefetches the keys of all tokens, which only a few rows read."""
    with code.loop(0, split.tokens) as token:
        prefetch_key(shape, split.keys.from_(split.places.count(token)), keep=2)


def _pairs(numbers: Memory) -> Floats:
    """32 numbers as bfloat16, two in each lane."""
    if numbers.element == BFLOAT16:
        return numbers.of(FLOAT).vector()
    every = numbers.in_lanes(2 * numbers.lanes).vector()
    even, odd = (list(range(first, every.lanes, 2)) for first in (0, 1))
    return paired(every.arranged(every, even), every.arranged(every, odd))

"""Scores of many rows, with keys that are laid out for them once per split.

In VectorProducts (attention_products.py) a vector has numbers of one key, so each score ends with
a sum over lanes, which takes almost as many instructions as its products. Here each lane of a
vector has the same dimension of another key, and is multiplied by that dimension of a query:

    keys       [tokens / lanes, head_dim, lanes]

What is a lane there is a sum here, and these sums are added in the order of `vectors.totals`. So
the bits are the same, and the number of rows may decide which code runs.
"""

from __future__ import annotations

from llvmlite import ir

from baton.kernels.cpu.attention_shape import (
    WEIGHTS_STRIDE,
    ContextSplit,
    Heads,
    Step,
    clamped_places,
    prefetch_value,
)
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Function, Memory
from baton.kernels.cpu.vectors import QUAD, Floats, transposed

LANES = tuple(quad + lane for quad in (0, 8, 4, 12) for lane in range(QUAD))
"""Lanes in the order of `vectors.totals`: neighbours are added, then neighbouring pairs, and so
on."""


class ColumnScores:
    """Functions for shape.rows rows. Results of rows beyond the last are meaningless."""

    def __init__(self, module: ir.Module, shape: Heads) -> None:
        self._module, self._shape = module, shape
        self._lay_out, self._score = self._lay_out_code(), self._score_code()

    def lay_out(self, code: Function, memory: dict[str, Memory], split: ContextSplit) -> None:
        """Lays out the keys in memory["keys"]."""
        code.call(self._lay_out, split.keys, split.places, split.tokens, memory["keys"])

    def scores(self, code: Function, at: Step, memory: dict[str, Memory]) -> None:
        """Stores products of queries and keys in memory["weights"]."""
        size = self._shape.head_dim
        queries = memory["queries"].from_(at.row * size)
        keys = memory["keys"].from_(at.token * size)
        scores = memory["weights"].from_(at.row * WEIGHTS_STRIDE + at.token)
        code.call(self._score, queries, keys, at.tokens, scores)

    def _lay_out_code(self) -> Function:
        """Repeats the last token at the end: (keys, places, tokens, laid out)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "lay_out_keys", types, lanes=shape.lanes)
        keys, places, tokens, out = code.arguments
        with code.loop(0, tokens, step=shape.lanes) as first:
            at = clamped_places(keys.of(shape.stored), places, first, tokens, shape.lanes)
            for key in at:
                prefetch_value(shape, key)
            block = out.from_(first * shape.head_dim)
            with code.loop(0, shape.head_dim, step=shape.lanes) as dim:
                for number, of_tokens in enumerate(transposed([key.vector(dim) for key in at])):
                    block.put(of_tokens, (dim + number) * shape.lanes)
        code.end()
        return code

    def _score_code(self) -> Function:
        """(queries, laid out keys, tokens, scores)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, POINTER]
        code = Function(self._module, "column_scores", types, lanes=shape.lanes)
        queries, keys, tokens, scores = code.arguments
        with code.loop(0, tokens, step=shape.lanes) as first:
            numbers = keys.from_(first * shape.head_dim)
            for row, score in enumerate(self._totals(queries, numbers, LANES)):
                scores.put(score, first + row * WEIGHTS_STRIDE)
        code.end()
        return code

    def _totals(self, queries: Memory, keys: Memory, lanes: tuple[int, ...]) -> list[Floats]:
        """Each row's sum over these lanes."""
        if len(lanes) == 1:
            return self._lane(queries, keys, *lanes)
        half = len(lanes) // 2
        parts = (self._totals(queries, keys, some) for some in (lanes[:half], lanes[half:]))
        return [one + other for one, other in zip(*parts, strict=True)]

    def _lane(self, queries: Memory, keys: Memory, lane: int) -> list[Floats]:
        """Each row's sum of every 16th product, from `lane` on."""
        shape = self._shape
        sums: list[Floats] = []
        for dim in range(lane, shape.head_dim, shape.lanes):
            key = keys.vector(dim * shape.lanes)
            of_rows = [queries.repeated(row * shape.head_dim + dim) for row in range(shape.rows)]
            if not sums:  # one instruction less than adding to 0; only the sign of 0 differs
                sums = [query * key for query in of_rows]
            else:
                sums = [
                    total.plus_product(query, key)
                    for total, query in zip(sums, of_rows, strict=True)
                ]
        return sums

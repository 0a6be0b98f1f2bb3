"""Compiled attention over paged keys and values, for single queries and for a prompt's chunk.

Both compute rows as attention_tile.py describes. Their work items differ:

    decode   some key heads of one sequence over one split; a second function merges the parts
    chunk    one key head of some tokens over their whole context, split by split, so that a
             split's keys and values are read once for all of the tokens
"""

from __future__ import annotations

import ctypes

from llvmlite import ir

from baton.kernels.cpu import amx
from baton.kernels.cpu.attention_products import prefetch_keys
from baton.kernels.cpu.attention_shape import (
    MANY_ROWS,
    SPLIT,
    WEIGHTS_STRIDE,
    ContextSplit,
    Heads,
    PageTable,
)
from baton.kernels.cpu.attention_tile import Merging, Tiles, copy_query, find_tokens
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Arguments, Count, Function, Memory

CHUNK_ROWS = 48
"""Approximate rows of a chunk's work item: more rows reuse each key and value more often, fewer
keep more threads busy."""


CHUNK_ROWS_LAID_OUT = 192
"""The same if keys are laid out for each work item."""

ITEMS_OF_THREAD = 4
"""An item gets more than CHUNK_ROWS, or several key heads, only if each thread has at least this
many items."""

CHUNK_STEP = 64
"""Tokens that all rows of a work item read before the next ones: as many as fit into the L1
cache. On tile registers they read a whole split, so that sums are loaded and stored once."""


class DecodeArguments(ctypes.Structure):
    """Arguments of `attend` and `merge`."""

    _fields_ = (
        ("queries", ctypes.c_void_p),  # [sequences, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # numbers from one sequence's to the next's
        ("cache", ctypes.c_void_p),  # the layer's keys of page 0
        ("page_stride", ctypes.c_int64),  # numbers from one page to the next
        ("tables", ctypes.c_void_p),  # [sequences, table_width], page ids, int64
        ("table_width", ctypes.c_int64),
        ("start", ctypes.c_void_p),  # [sequences], the position of a table's first token, int64
        ("first", ctypes.c_void_p),  # [sequences], the position of the first visible token
        ("end", ctypes.c_void_p),  # [sequences], the position after the last one
        ("sequences", ctypes.c_int64),
        ("splits", ctypes.c_int64),  # most splits of any sequence
        ("heads_of_item", ctypes.c_int64),  # key heads of a work item
        ("sinks", ctypes.c_void_p),  # float32 [heads]
        ("scratch", ctypes.c_void_p),  # [threads, Scratch.numbers]
        ("parts", ctypes.c_void_p),  # [sequences, heads, splits, part_numbers]
        ("out", ctypes.c_void_p),  # [sequences, heads, value_dim]
        ("threads_started", ctypes.c_int64),  # 0 at first
        ("items_claimed", ctypes.c_int64),  # 0 at first
        ("merges_claimed", ctypes.c_int64),  # 0 at first
    )


class ChunkArguments(ctypes.Structure):
    """Arguments of `attend_chunk`."""

    _fields_ = (
        ("queries", ctypes.c_void_p),  # [tokens, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # numbers from one token's to the next's
        ("cache", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("table", ctypes.c_void_p),  # page ids, int64
        ("start", ctypes.c_int64),  # the position of the table's first token
        ("position", ctypes.c_int64),  # of the chunk's first token
        ("tokens", ctypes.c_int64),
        ("tokens_of_item", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),  # float32 [heads]
        ("scratch", ctypes.c_void_p),  # [threads, Scratch.numbers]
        ("out", ctypes.c_void_p),  # [tokens, heads, value_dim]
        ("threads_started", ctypes.c_int64),  # 0 at first
        ("items_claimed", ctypes.c_int64),  # 0 at first
    )


class Scratch:
    """A thread's memory for items of up to `rows` rows."""

    def __init__(self, shape: Heads, rows: int) -> None:
        rows = -(-rows // shape.rows) * shape.rows
        laid_out, many = SPLIT * shape.head_dim // 2 if shape.amx else 0, rows >= MANY_ROWS
        sizes = {
            "places": 2 * SPLIT,  # 64-bit offsets
            "bounds": 4 * rows,  # 64-bit numbers
            "weights": min(rows, shape.rows_at_once) * WEIGHTS_STRIDE,
            "queries": rows * shape.head_dim,
            "parts": rows * shape.part_numbers,
            "merged": rows * shape.part_numbers,
            "keys": SPLIT * shape.head_dim if shape.columns and many else laid_out,
            "values": SPLIT * shape.value_dim if shape.copies_values and many else laid_out,
            "scales": 2 * SPLIT if shape.scaled else 0,
            "copied keys": SPLIT * shape.head_dim if shape.unpacked else 0,
            "copied values": SPLIT * shape.head_dim if shape.unpacked else 0,
            "copied places": 2 * SPLIT if shape.unpacked else 0,
        }
        self._operand = shape.operand
        self._starts, start = {}, 0
        for name, size in sizes.items():
            self._starts[name] = start
            start += -(-size // 16) * 16
        self.numbers = start

    def of_thread(self, code: Function, given: Arguments) -> Memory:
        """This thread's memory."""
        counter = given.field("threads_started").value
        one = ir.Constant(COUNT, 1)
        thread = Count(code.builder, code.builder.atomic_rmw("add", counter, one, "monotonic"))
        return given.memory("scratch").from_(thread * self.numbers)

    def parts_of(self, memory: Memory) -> dict[str, Memory]:
        """A thread's memory, by name."""
        parts = {name: memory.from_(start) for name, start in self._starts.items()}
        return parts | {"queries": parts["queries"].of(self._operand)}


def library(shape: Heads) -> Library:
    """Compiles the functions of `AttentionCode`."""
    return Library(_module, shape)


def _module(shape: Heads) -> ir.Module:
    return AttentionCode(shape).write()


class AttentionCode:
    """Writes the functions `attend`, which computes the parts of single queries, `merge`, which
    merges them, and `attend_chunk`."""

    def __init__(self, shape: Heads) -> None:
        self._shape = shape
        least = CHUNK_ROWS_LAID_OUT if shape.amx else CHUNK_ROWS
        most = CHUNK_ROWS_LAID_OUT if shape.columns else least
        self._least, self._most = (max(1, rows // shape.group) for rows in (least, most))
        self.decode_scratch = Scratch(shape, shape.group)
        self.chunk_scratch = Scratch(shape, self._most * shape.group)

    def tokens_of_item(self, tokens: int, threads: int) -> int:
        """Tokens of a work item, for a chunk of `tokens`. No result depends on it."""
        each = tokens * self._shape.kv_heads // (ITEMS_OF_THREAD * threads)
        return min(max(each, self._least), self._most)

    def heads_of_item(self, splits: int, threads: int) -> int:
        """Key heads of a work item, for this many splits of all sequences, of which half may lie
        after a sequence's end. Heads lie beside each other in memory, so one thread reads all of
        them if there are items enough. No result depends on it."""
        heads = self._shape.kv_heads
        return min(max(1, heads * splits // (2 * ITEMS_OF_THREAD * threads)), heads)

    def write(self) -> ir.Module:
        self._module = ir.Module("attention")
        self._tiles = Tiles(self._module, self._shape)
        self._merging = Merging(self._module, self._shape)
        self._attend()
        self._merge()
        self._attend_chunk()
        return self._module

    def _attend(self) -> None:
        shape, item = self._shape, self._item()
        code = Function(self._module, "attend", [POINTER], lanes=shape.lanes, exported=True)
        structure = code.arguments[0]
        given = Arguments(structure, DecodeArguments)
        scratch, splits = self.decode_scratch.of_thread(code, given), given.count("splits")
        heads = given.count("heads_of_item")
        groups = (heads + (shape.kv_heads - 1)) // heads
        items = given.count("sequences") * groups * splits
        registers = amx.tile_registers(code, used=shape.amx)
        with registers, code.claim(given.field("items_claimed"), items) as number:
            index, rest = number % splits, number // splits
            code.call(item, structure, scratch, rest // groups, rest % groups * heads, index)
        code.end()

    def _item(self) -> Function:
        """One split of some key heads: (arguments, scratch, sequence, first kv_head, split)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, COUNT, COUNT]
        code = Function(self._module, "item", types, lanes=shape.lanes)
        structure, scratch, sequence, first_head, index = code.arguments
        given = Arguments(structure, DecodeArguments)
        memory, splits = self.decode_scratch.parts_of(scratch), given.count("splits")
        table = given.memory("tables", COUNT).from_(sequence * given.count("table_width"))
        start, first, end = (
            given.memory(name, COUNT).count(sequence) for name in ("start", "first", "end")
        )
        pages = PageTable(table, given.count("page_stride"), start)
        rows, number = Count(code.builder, ir.Constant(COUNT, shape.group)), first // SPLIT + index
        begin, split = self._split(code, given, memory, pages, number, first, end, rows)
        with code.loop(0, shape.group) as row:
            self._put_bounds(memory["bounds"], row, first - begin, end - begin, split)
        last_head = (first_head + given.count("heads_of_item")).at_most(shape.kv_heads)
        with code.loop(first_head, last_head) as kv_head:
            head = kv_head * shape.group
            query = given.memory("queries", shape.element).from_(
                sequence * given.count("query_stride") + head * shape.head_dim
            )
            with code.loop(0, shape.group * shape.head_dim, step=shape.head_dim) as at:
                copy_query(code, shape, query.from_(at), memory["queries"].from_(at))
            of_head = split.of_head(kv_head * shape.head_stride)
            if shape.amx and not shape.unpacked:
                prefetch_keys(code, shape, of_head)
            parts = given.memory("parts").from_(
                ((sequence * shape.heads + head) * splits + index) * shape.part_numbers
            )
            self._tiles.make_parts(code, rows, memory, of_head, SPLIT)
            with (
                code.loop(0, shape.group) as row,
                code.loop(0, shape.part_numbers, step=shape.lanes) as at,
            ):
                part = memory["parts"].vector(row * shape.part_numbers + at)
                parts.put(part, row * splits * shape.part_numbers + at)
        code.end()
        return code

    def _split(
        self,
        code: Function,
        given: Arguments,
        memory: dict[str, Memory],
        pages: PageTable,
        number: Count,
        first: Count,
        end: Count,
        rows: Count,
    ) -> tuple[Count, ContextSplit]:
        """Where split `number` begins, and the split of the first key head, cut to positions
        [first, end)."""
        shape = self._shape
        begin = (number * SPLIT).at_least(first // shape.aligned * shape.aligned)
        stop = ((number + 1) * SPLIT).at_most(end)
        keys = given.memory("cache", shape.stored)
        values = keys.from_(shape.value_offset)
        places = memory["places"].of(COUNT)
        split = ContextSplit(keys, values, places, (stop - begin).at_least(0), rows)
        find_tokens(code, shape, pages, begin, first, split)
        return begin, split

    def _put_bounds(
        self, bounds: Memory, row: Count, first: Count, end: Count, split: ContextSplit
    ) -> None:
        """Stores which of the split's tokens a row sees."""
        first, end = first.at_least(0).at_most(split.tokens), end.at_least(0).at_most(split.tokens)
        bounds.of(COUNT).put_count(first, row * 2)
        bounds.of(COUNT).put_count(end, row * 2 + 1)

    def _merge(self) -> None:
        shape = self._shape
        code = Function(self._module, "merge", [POINTER], lanes=shape.lanes, exported=True)
        given = Arguments(code.arguments[0], DecodeArguments)
        memory = self.decode_scratch.parts_of(self.decode_scratch.of_thread(code, given))
        merged = memory["merged"]
        splits, rows = given.count("splits"), given.count("sequences") * shape.heads
        with code.claim(given.field("merges_claimed"), rows) as row:
            code.call(self._merging.begin, merged, given.memory("sinks").from_(row % shape.heads))
            first, end = (
                given.memory(name, COUNT).count(row // shape.heads) for name in ("first", "end")
            )
            # Splits after a sequence's last token were not computed.
            with code.loop(0, (end + SPLIT - 1) // SPLIT - first // SPLIT) as index:
                at = (row * splits + index) * shape.part_numbers
                code.call(self._merging.add, merged, given.memory("parts").from_(at))
            out = given.memory("out", shape.element).from_(row * shape.value_dim)
            code.call(self._merging.finish, merged, out)
        code.end()

    def _attend_chunk(self) -> None:
        shape, block = self._shape, self._block()
        code = Function(self._module, "attend_chunk", [POINTER], lanes=shape.lanes, exported=True)
        structure = code.arguments[0]
        given = Arguments(structure, ChunkArguments)
        scratch = self.chunk_scratch.of_thread(code, given)
        tokens_of_item = given.count("tokens_of_item")
        blocks = (given.count("tokens") + tokens_of_item - 1) // tokens_of_item
        items, registers = blocks * shape.kv_heads, amx.tile_registers(code, used=shape.amx)
        with registers, code.claim(given.field("items_claimed"), items) as item:
            # The last tokens have the longest context, so they go first.
            index = blocks - 1 - item // shape.kv_heads
            code.call(block, structure, scratch, index, item % shape.kv_heads)
        code.end()

    def _block(self) -> Function:
        """Some tokens for one key head: (arguments, scratch, block, kv_head)"""
        shape, types = self._shape, [POINTER, POINTER, COUNT, COUNT]
        code = Function(self._module, "block", types, lanes=shape.lanes)
        structure, scratch, index, kv_head = code.arguments
        given = Arguments(structure, ChunkArguments)
        memory = self.chunk_scratch.parts_of(scratch)
        token = index * given.count("tokens_of_item")
        tokens = (given.count("tokens") - token).at_most(given.count("tokens_of_item"))
        rows = tokens * shape.group
        self._begin_rows(code, given, memory, token, kv_head, rows)
        position, window = given.count("position") + token, given.count("window")
        first, end = (position - window + 1).at_least(0), position + tokens
        pages = PageTable(
            given.memory("table", COUNT), given.count("page_stride"), given.count("start")
        )
        with code.loop(first // SPLIT, (end + SPLIT - 1) // SPLIT) as number:
            begin, split = self._split(code, given, memory, pages, number, first, end, rows)
            split = split.of_head(kv_head * shape.head_stride)
            with code.loop(0, rows) as row:
                after = position + row // shape.group + 1 - begin
                self._put_bounds(memory["bounds"], row, after - window, after, split)
            step = SPLIT if shape.amx else CHUNK_STEP
            self._tiles.make_parts(code, rows, memory, split, step)
            with code.loop(0, rows * shape.part_numbers, step=shape.part_numbers) as at:
                part = memory["parts"].from_(at)
                code.call(self._merging.add, memory["merged"].from_(at), part)
        out = given.memory("out", shape.element)
        with code.loop(0, rows) as row:
            at = self._place(row, token, kv_head, shape.heads * shape.value_dim, shape.value_dim)
            merged = memory["merged"].from_(row * shape.part_numbers)
            code.call(self._merging.finish, merged, out.from_(at))
        code.end()
        return code

    def _begin_rows(
        self,
        code: Function,
        given: Arguments,
        memory: dict[str, Memory],
        token: Count,
        kv_head: Count,
        rows: Count,
    ) -> None:
        """Copies the tokens' queries as rows, one token after another, and begins their sums."""
        shape, queries = self._shape, given.memory("queries", self._shape.element)
        with code.loop(0, rows) as row:
            stride = given.count("query_stride")
            source = self._place(row, token, kv_head, stride, shape.head_dim)
            target = memory["queries"].from_(row * shape.head_dim)
            copy_query(code, shape, queries.from_(source), target)
            sink = given.memory("sinks").from_(kv_head * shape.group + row % shape.group)
            merged = memory["merged"].from_(row * shape.part_numbers)
            code.call(self._merging.begin, merged, sink)

    def _place(
        self, row: Count, token: Count, kv_head: Count, stride: Count | int, size: int
    ) -> Count:
        """The offset of a row in [token, head], with `stride` numbers per token and `size` per
        head."""
        head = kv_head * self._shape.group + row % self._shape.group
        return (token + row // self._shape.group) * stride + head * size

"""A ctypes structure of 8-byte fields, as compiled code reads it."""

from __future__ import annotations

import ctypes

from baton.kernels.cpu.code import COUNT, POINTER, Count, Memory


class Arguments:
    """The fields of `kind` at `structure`."""

    def __init__(self, structure: Memory, kind: type[ctypes.Structure]) -> None:
        slots = Memory(structure.builder, structure.value, COUNT)
        names = [field[0] for field in kind._fields_]
        self._slots = {name: slots.from_(slot) for slot, name in enumerate(names)}

    def count(self, name: str) -> Count:
        return self._slots[name].count()

    def floats(self, name: str) -> Memory:
        """The float32 numbers that the field points to."""
        slot = self._slots[name]
        return Memory(slot.builder, slot.builder.load(slot.value, typ=POINTER, align=8))

    def counts(self, name: str) -> Memory:
        """The 64-bit integers that the field points to."""
        found = self.floats(name)
        return Memory(found.builder, found.value, COUNT)

    def number(self, name: str) -> Memory:
        """The field itself, one float32."""
        slot = self._slots[name]
        return Memory(slot.builder, slot.value)

    def counter(self, name: str) -> Memory:
        """The field itself, an integer."""
        return self._slots[name]

"""A number for each of the two pools."""

from __future__ import annotations

from typing import NamedTuple

from baton.core.types import Role


class Pools(NamedTuple):
    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    def beyond(self, other: Pools) -> Pools:
        """By how much each is more than the other's; 0 where it is not."""
        return Pools(max(0, self.prefill - other.prefill), max(0, self.decode - other.decode))

    def with_more(self, role: Role, count: int) -> Pools:
        if role is Role.PREFILL:
            return Pools(self.prefill + count, self.decode)
        return Pools(self.prefill, self.decode + count)


NONE = Pools(0, 0)
ONE_EACH = Pools(1, 1)


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL

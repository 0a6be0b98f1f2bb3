"""Bytes of a head's codes of four bits in pages (kernels/half_bytes.py), for those who count them
without torch."""

from __future__ import annotations

GROUP = 16
"""Numbers of a head with one scale and middle."""

PAIR_BYTES = 4
"""Of these two."""


def groups_of(head_dim: int) -> int:
    return -(-head_dim // GROUP)


def stored_bytes(head_dim: int) -> int:
    """Of a head's codes, scales and middles."""
    return head_dim // 2 + groups_of(head_dim) * PAIR_BYTES


def gpu_stored_bytes(head_dim: int) -> int:
    """The same on a GPU: halves are powers of two, and the next head's codes are aligned, since it
    loads 16 bytes at a time."""
    return gpu_half(head_dim) + -(-groups_of(head_dim) * PAIR_BYTES // 16) * 16


def gpu_half(head_dim: int) -> int:
    """Bytes of a head's codes on a GPU, and numbers in either half of it."""
    return max(GROUP, 1 << (head_dim - 1).bit_length() - 1)


def head_dim_of(stored: int) -> int:
    """The numbers of a head in so many bytes."""
    whole, rest = divmod(stored, stored_bytes(GROUP))
    return whole * GROUP + max(0, rest - PAIR_BYTES) * 2

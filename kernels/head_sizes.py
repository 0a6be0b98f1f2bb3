"""Sizes of a head's four-bit codes in pages (kernels/half_bytes.py), for code without torch."""

from __future__ import annotations

GROUP = 16
"""Numbers of a head that share one scale and middle."""

PAIR_BYTES = 4
"""Bytes of a scale and a middle."""


def groups_of(head_dim: int) -> int:
    return -(-head_dim // GROUP)


def stored_bytes(head_dim: int) -> int:
    """Bytes of a head's codes, scales and middles."""
    return head_dim // 2 + groups_of(head_dim) * PAIR_BYTES


def gpu_stored_bytes(head_dim: int) -> int:
    """The same on a GPU. It loads 16 bytes at a time, so halves are powers of two and the next
    head's codes are aligned."""
    return gpu_half(head_dim) + -(-groups_of(head_dim) * PAIR_BYTES // 16) * 16


def gpu_half(head_dim: int) -> int:
    """Bytes of a head's codes on a GPU, which is also how many numbers each half has."""
    return max(GROUP, 1 << (head_dim - 1).bit_length() - 1)


def head_dim_of(stored: int) -> int:
    """Numbers of a head that takes `stored` bytes: the inverse of `stored_bytes`."""
    whole, rest = divmod(stored, stored_bytes(GROUP))
    return whole * GROUP + max(0, rest - PAIR_BYTES) * 2

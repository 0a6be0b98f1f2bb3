"""Whether two pools arrange their pages alike.

A page is copied byte for byte, so every field of `PoolLayout` must be equal on
both sides. The digest travels in each ticket; the sentence is for operators.

Version history of the arrangement:

    1   [page, layer, k/v, token, kv_head, dim], one page contiguous
"""

from __future__ import annotations

import hashlib

from baton.v1.transfer_pb2 import PoolLayout

LAYOUT_VERSION = 1


def layout_hash(layout: PoolLayout) -> bytes:
    """A digest of the layout's values. It does not depend on how protobuf encodes them."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in _fields(layout):
        digest.update(f"{name}={value!r}\n".encode())
    return digest.digest()


def cache_root(layout: PoolLayout) -> bytes:
    """The root of the keys of pages (core/page_keys.py): equal where pages can be exchanged."""
    return hashlib.blake2b(layout_hash(layout), digest_size=16, person=b"baton-cache").digest()


def describe_mismatch(ours: PoolLayout, theirs: PoolLayout) -> str:
    """Names the fields that differ, with both values; empty when none does."""
    differing = [
        f"{name} is {our_value!r} here and {their_value!r} there"
        for (name, our_value), (_, their_value) in zip(_fields(ours), _fields(theirs), strict=True)
        if our_value != their_value
    ]
    return "; ".join(differing)


def _fields(layout: PoolLayout) -> list[tuple[str, int | str]]:
    return [(field.name, getattr(layout, field.name)) for field in PoolLayout.DESCRIPTOR.fields]

"""Names for pages of keys and values by what they hold.

A full page's key names everything its contents depend on: the model and layout
(the root), who may share it (the salt), all tokens before it (through the key of
the page before) and its own tokens. Equal keys mean equal contents, on every
worker and in every router.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
TOKEN_BYTES = 4


def salted_root(root: bytes, salt: str) -> bytes:
    """The parent of first pages for those who share `salt`; other salts share nothing."""
    return blake2b(root + salt.encode(), digest_size=KEY_BYTES, person=b"baton-salt").digest()


def page_keys(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """The keys of the full pages of `tokens`, which follow the page with key `parent`."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    width = page_size * TOKEN_BYTES
    keys = []
    for start in range(0, len(packed) - width + 1, width):
        page = packed[start : start + width]
        parent = blake2b(parent + page, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys

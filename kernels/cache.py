"""The paged K/V memory as one layer sees it.

The memory is [page, layer, k/v, token, kv_head, dim], so a page is contiguous for a transfer.
k/v has size two: keys, then values. For latents it has size one: a latent is the only key head, and
its first numbers are the value. If the memory holds codes, dim counts the bytes of a head's codes
and of the scales behind them (int8: kernels/integers.py; uint8 holds int4: kernels/half_bytes.py),
so a transfer of pages or heads moves both.

A layer reads and writes the memory as rows. Its views start at its own offset, so the same row
indices, made once per step, are valid for every layer of a slice (core/page_reach.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels import SCALE_BYTES
from baton.kernels.cpu import compiler
from baton.kernels.half_bytes import half_byte_codes, half_byte_numbers
from baton.kernels.head_sizes import head_dim_of
from baton.kernels.integers import head_codes, head_numbers
from baton.kernels.linear import RMSNorm

Norms = tuple[RMSNorm | None, RMSNorm | None]
"""The norm of queries and the norm of keys."""


class _Coding(NamedTuple):
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


_CODINGS = {
    torch.int8: _Coding(head_codes, head_numbers),
    torch.uint8: _Coding(half_byte_codes, half_byte_numbers),
}
"""By the dtype of the memory."""


class LayerCache(NamedTuple):
    """One layer's keys and values, by page and by token."""

    kv: Tensor  # [page, k/v, token, kv_head, dim]
    pages: Tensor  # [rows, page_size * kv_heads * dim]; see gather
    tokens: Tensor  # [rows, kv_heads * dim]; see token_rows
    layers: int  # how many a page holds
    table: int  # which of a sequence's tables lists its pages
    value_dim: int  # numbers of a head's value

    @property
    def scaled(self) -> bool:
        """True if keys and values are codes with scales."""
        return self.kv.dtype in _CODINGS

    @property
    def head_dim(self) -> int:
        return _head_dim(self.kv)

    @property
    def lanes(self) -> int:
        """Lanes of vectors that divide keys and values evenly; 0 if none do."""
        size = math.gcd(self.head_dim, self.value_dim)
        if self.kv.dtype == torch.uint8:  # a vector of bytes has codes of either half
            size //= 2
        return compiler.lanes_for(size, compiler.registers())


def layer_caches(
    kv: Tensor, value_dim: int | None = None, places: Sequence[tuple[int, int]] | None = None
) -> list[LayerCache]:
    """Views of kv [page, layer of a page, k/v, token, kv_head, dim], one per layer of the model.
    `value_dim` is needed for latents. `places` has each layer's table and its index in a page; by
    default a page has all layers."""
    _, layers, parts, page_size = kv.shape[:4]
    pages, tokens = kv.flatten(3).flatten(0, 2), kv.flatten(4).flatten(0, 3)
    return [
        LayerCache(
            kv[:, place],
            pages[parts * place :],
            tokens[parts * place * page_size :],
            layers,
            table,
            value_dim or _head_dim(kv),
        )
        for table, place in places or [(0, layer) for layer in range(layers)]
    ]


def _head_dim(kv: Tensor) -> int:
    if kv.dtype == torch.uint8:
        return head_dim_of(kv.shape[-1])
    return kv.shape[-1] - (SCALE_BYTES if kv.dtype == torch.int8 else 0)


def token_rows(
    pages: Tensor, offsets: Tensor, layers: int, page_size: int, parts: int = 2
) -> Tensor:
    """Rows of LayerCache.tokens: page ids and offsets within them [T] -> [T, k/v]."""
    keys = pages * (parts * layers * page_size) + offsets
    return torch.stack([keys + part * page_size for part in range(parts)], dim=1)


def write_(cache: LayerCache, rows: Tensor, keys_values: Tensor) -> None:
    """Stores keys_values [T, k/v * kv_heads, head_dim], keys first, at rows [T, k/v]."""
    if cache.scaled:
        keys_values = _CODINGS[cache.kv.dtype].encode(keys_values)
    cache.tokens.index_put_((rows,), keys_values.reshape(*rows.shape, -1))


def gather(cache: LayerCache, pages: Tensor) -> Tensor:
    """Pages [n] in their memory layout: all keys, then all values."""
    parts = cache.kv.shape[1]
    keys = pages * (parts * cache.layers)
    rows = torch.cat([keys + part for part in range(parts)])
    return cache.pages.index_select(0, rows)


def by_heads(found: Tensor, cache: LayerCache, sequences: int) -> Tensor:
    """Gathered pages as [k/v, sequences, kv_heads, tokens, dim]."""
    _, parts, _, kv_heads, dim = cache.kv.shape
    return found.view(parts, sequences, -1, kv_heads, dim).transpose(2, 3)


def keys_values(found: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Splits found [k/v, ..., dim] into keys and values; codes are decoded to float32."""
    if cache.scaled:
        found = _CODINGS[cache.kv.dtype].decode(found)
    return found[0], found[-1][..., : cache.value_dim]


def prepare_rotation(cache: LayerCache, dtype: torch.dtype) -> None:
    """Compiles the code for numbers in `dtype` ahead of the first call."""
    if compiler.suits(dtype, cache.kv.device) and cache.lanes:
        from baton.kernels.cpu.rotation import compiled_rotation  # imports llvmlite

        compiled_rotation(cache.lanes, dtype, cache.kv.dtype, cache.kv.shape[1])


def rotate_and_write_(
    qkv: Tensor,
    heads: int,
    norms: Norms,
    rotation: Tensor | None,
    cache: LayerCache,
    rows: Tensor,
) -> None:
    """Normalizes the queries and keys of qkv [T, heads + k/v * kv_heads, head_dim], rotates them by
    rotation [T, 1, head_dim / 2], each if given, and stores keys and values at rows [T, k/v].

    A norm is over one head, over its first numbers or over all heads.
    """
    if compiler.suits(qkv.dtype, qkv.device) and cache.lanes:
        from baton.kernels.cpu.rotation import rotate_and_write  # imports llvmlite

        rotate_and_write(qkv, heads, norms, rotation, cache, rows)
        return
    kv_heads = cache.kv.shape[3]
    parts = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    for norm, part in zip(norms, parts, strict=True):
        if norm:
            _normalize_(part, norm)
    if rotation is not None:
        rotate_(qkv, heads + kv_heads, rotation)
    write_(cache, rows, qkv[:, heads:])


def _normalize_(part: Tensor, norm: RMSNorm) -> None:
    """part [T, heads, head_dim]"""
    size = len(norm.weight)
    if size <= part.shape[2]:
        part[..., :size] = norm(part[..., :size])
    else:
        part.copy_(norm(part.flatten(1)).view(part.shape))


def rotate_(x: Tensor, heads: int, rotation: Tensor) -> None:
    """Rotates the first `heads` heads of x [T, all heads, head_dim] by [T, 1, head_dim / 2].

    A pair of neighbouring dimensions is one complex number.
    """
    pairs = x.view(*x.shape[:2], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs)[:, :heads].mul_(rotation)
    else:
        rotated = torch.view_as_complex(pairs[:, :heads].float()) * rotation
        pairs[:, :heads] = torch.view_as_real(rotated)

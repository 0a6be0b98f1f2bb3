"""The paged K/V memory as one layer sees it.

The memory is [page, layer, 2, token, kv_head, dim], so a page of all layers is contiguous
for a transfer. A layer reads and writes it as rows: its views start at its own offset, so
the same row indices, made once per step, serve every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.linear import RMSNorm


class LayerCache(NamedTuple):
    """One layer's keys and values, by page and by token."""

    kv: Tensor  # [page, 2, token, kv_head, dim]
    pages: Tensor  # [rows, page_size * kv_heads * head_dim]; see page_rows
    tokens: Tensor  # [rows, kv_heads * head_dim]; see token_rows
    layers: int


def layer_caches(kv: Tensor) -> list[LayerCache]:
    """Views of kv [page, layer, 2, token, kv_head, dim], one per layer."""
    layers, page_size = kv.shape[1], kv.shape[3]
    pages, tokens = kv.flatten(3).flatten(0, 2), kv.flatten(4).flatten(0, 3)
    return [
        LayerCache(kv[:, layer], pages[2 * layer :], tokens[2 * layer * page_size :], layers)
        for layer in range(layers)
    ]


def page_rows(pages: Tensor, layers: int) -> Tensor:
    """Rows of LayerCache.pages: page ids [n] -> [2 * n], all keys, then all values."""
    keys = pages * (2 * layers)
    return torch.cat((keys, keys + 1))


def token_rows(pages: Tensor, offsets: Tensor, layers: int, page_size: int) -> Tensor:
    """Rows of LayerCache.tokens: page ids and offsets within them [T] -> [T, 2], key and value."""
    keys = pages * (2 * layers * page_size) + offsets
    return torch.stack((keys, keys + page_size), dim=1)


def write_(cache: LayerCache, rows: Tensor, keys_values: Tensor) -> None:
    """Stores keys_values [T, 2 * kv_heads, head_dim], keys first, at rows [T, 2]."""
    cache.tokens.index_put_((rows,), keys_values.view(*rows.shape, -1))


def gather(cache: LayerCache, rows: Tensor) -> Tensor:
    """The pages at rows [2 * sequences * pages], in their memory layout."""
    return cache.pages.index_select(0, rows)


def by_heads(found: Tensor, cache: LayerCache, sequences: int, head_dim: int) -> Tensor:
    """Gathered pages as [2, sequences, kv_heads, tokens, head_dim]."""
    kv_heads = cache.tokens.shape[1] // head_dim
    return found.view(2, sequences, -1, kv_heads, head_dim).transpose(2, 3)


def prepare_rotation(head_dim: int, cache: LayerCache) -> None:
    """Compiles ahead of the first call."""
    if compiler.suits(cache.kv) and compiler.lanes_for(head_dim, compiler.registers()):
        from baton.kernels.cpu.rotation import compiled_rotation  # imports llvmlite

        compiled_rotation(head_dim, cache.kv.dtype, compiler.registers())


def rotate_and_write_(
    qkv: Tensor,
    heads: int,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotation: Tensor | None,
    cache: LayerCache,
    rows: Tensor,
) -> None:
    """Normalizes the queries and keys of qkv [T, heads + 2 * kv_heads, head_dim] by their norms,
    which are of one head or of all, rotates them by rotation [T, 1, head_dim / 2], each if given,
    and stores keys and values at rows [T, 2]."""
    if compiler.suits(qkv) and compiler.lanes_for(qkv.shape[2], compiler.registers()):
        from baton.kernels.cpu.rotation import rotate_and_write  # imports llvmlite

        rotate_and_write(qkv, heads, norms, rotation, cache.tokens, rows)
        return
    kv_heads = (qkv.shape[1] - heads) // 2
    if norms:
        parts = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        for norm, part in zip(norms, parts, strict=True):
            numbers = part.reshape(len(qkv), -1, len(norm.weight))
            part.copy_(norm(numbers).view(part.shape))
    if rotation is not None:
        rotate_(qkv, heads + kv_heads, rotation)
    write_(cache, rows, qkv[:, heads:])


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

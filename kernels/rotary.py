"""Turns queries and keys by their positions, and stores what later tokens will read."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.cache import LayerCache, write_
from baton.kernels.cpu import compiler


def rotate_and_write_(
    qkv: Tensor, heads: int, rotation: Tensor | None, cache: LayerCache, rows: Tensor
) -> None:
    """Turns the queries and keys of qkv [T, heads + 2 * kv_heads, head_dim] by rotation
    [T, 1, head_dim / 2], if there is one, and stores keys and values at rows [T, 2]."""
    if compiler.suits(qkv) and qkv.shape[2] % 4 == 0:
        from baton.kernels.cpu.rotation import rotate_and_write  # brings llvmlite along

        rotate_and_write(qkv, heads, rotation, cache.tokens, rows)
        return
    kv_heads = (qkv.shape[1] - heads) // 2
    if rotation is not None:
        rotate_(qkv, heads + kv_heads, rotation)
    write_(cache, rows, qkv[:, heads:])


def rotate_(x: Tensor, heads: int, rotation: Tensor) -> None:
    """Turns the first `heads` heads of x [T, all heads, head_dim] by rotation [T, 1, head_dim / 2].

    A pair of neighbouring dimensions is one complex number.
    """
    pairs = x.view(*x.shape[:2], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs)[:, :heads].mul_(rotation)
    else:
        turned = torch.view_as_complex(pairs[:, :heads].float()) * rotation
        pairs[:, :heads] = torch.view_as_real(turned)

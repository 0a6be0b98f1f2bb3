"""Turns queries and keys by their positions."""

from __future__ import annotations

import torch
from torch import Tensor


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

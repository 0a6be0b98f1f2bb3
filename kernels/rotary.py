"""Turns queries and keys by their positions."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_(x: Tensor, rotation: Tensor) -> None:
    """Turns each pair of neighbours in x [T, heads, head_dim] by rotation [T, 1, head_dim / 2]."""
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        turned = torch.view_as_complex(pairs.float()) * rotation
        pairs.copy_(torch.view_as_real(turned))

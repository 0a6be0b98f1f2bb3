"""Small arrays on their way between host and device, without waiting for either.

The page-locked memory is torch's own: freed while a copy is under way, it is
not handed out again before the copy has ended.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]


def upload(array: Ints, device: torch.device) -> Tensor:
    """The array on the device, in the order of its stream."""
    return _pinned(array, device).to(device, non_blocking=True)


def upload_into(target: Tensor, array: Ints) -> None:
    """The array [m] at the start of target [n], int32."""
    target[: array.size].copy_(_pinned(array, target.device), non_blocking=True)


def download(values: Tensor) -> Tensor:
    """The values as host memory, which is filled in the order of the stream."""
    pinned = values.device.type == "cuda"
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
    return there.copy_(values, non_blocking=True)


def _pinned(array: Ints, device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host

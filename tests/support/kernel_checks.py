"""Compares results of GPU kernels with their reference in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def types_for(device: torch.device, *on_a_gpu: torch.dtype) -> list[torch.dtype]:
    """float32, and the others where kernels are compiled: the interpreter is slow and has no
    bfloat16 products."""
    return [torch.float32, *(on_a_gpu if device.type == "cuda" else ())]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 20 * torch.finfo(found.dtype).eps

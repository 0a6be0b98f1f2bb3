"""How results of GPU kernels are compared with those of their twins."""

from __future__ import annotations

import torch
from torch import Tensor


def types_for(device: torch.device, *on_a_gpu: torch.dtype) -> list[torch.dtype]:
    """float32, and the others where kernels are compiled: the interpreter is slow, and
    multiplies no bfloat16."""
    return [torch.float32, *(on_a_gpu if device.type == "cuda" else ())]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 20 * torch.finfo(found.dtype).eps

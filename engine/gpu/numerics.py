"""Whether a row's bits may depend on the rows beside it.

    invariant   never: no product is split along its inputs, and our kernels attend all chunks
    fast        the matrix library may split a product; long chunks are attended by cuDNN, or by
                expanding latents to keys and values

In both, a sum's order does not depend on the kernel (kernels/gpu/fixed_order.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LT_ROWS = 64
"""Up to this many rows cuBLASLt picks faster products than cuBLAS, by 3% of a step."""


class Numerics(enum.StrEnum):
    INVARIANT = "invariant"
    FAST = "fast"

    @contextmanager
    def library(self, rows: int) -> Iterator[None]:
        """Sets the matrix library up for products of this many rows, as these numerics allow."""
        if not torch.cuda.is_available():
            yield
            return
        before = torch.backends.cuda.preferred_blas_library()
        # Only cuBLASLt can be told not to split a product's inputs.
        light = self is Numerics.INVARIANT or rows <= LT_ROWS
        torch.backends.cuda.preferred_blas_library("cublaslt" if light else "cublas")
        _allow_split_inputs(self is Numerics.FAST)
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)
            _allow_split_inputs(True)


def _allow_split_inputs(allowed: bool) -> None:
    """Sets both flags: sums in the inputs' type, and products split over the inputs."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (allowed, allowed)
    matmul.allow_fp16_reduced_precision_reduction = (allowed, allowed)

"""Keys and values as pages keep them, by torch."""

from __future__ import annotations

from torch import Tensor

from baton.engine.model_choice import KvDtype
from baton.kernels.half_bytes import half_byte_codes
from baton.kernels.integers import head_codes


def encode(heads: Tensor, kv_dtype: KvDtype) -> Tensor:
    """heads [..., head_dim] -> their codes and scales; as they are for auto."""
    if kv_dtype == "auto":
        return heads
    return head_codes(heads) if kv_dtype == "int8" else half_byte_codes(heads)

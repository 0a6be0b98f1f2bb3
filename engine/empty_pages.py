"""Allocates pools of pages."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.core.host_memory import available_bytes
from baton.engine.model_choice import AnyArchitecture, KvDtype, stored_shape
from baton.kernels import huge_pages
from baton.kernels.fp8 import FP8


def empty_pages(
    architecture: AnyArchitecture,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: KvDtype,
    device: str,
    pages: int,
    where: str,
) -> Tensor:
    """Pages in the layout for `device`, allocated on `where`: there, or on "meta" (no memory)."""
    if page_size < 1:
        raise InvalidConfig(f"a page holds at least 1 token, not {page_size}", field="page_size")
    shape = stored_shape(architecture.pages_shape(pages, page_size), kv_dtype, device)
    stored = stored_dtype(kv_dtype, dtype)
    if where == "cpu":
        return huge_pages.zeros(shape, stored)
    return torch.zeros(shape, dtype=stored, device=where)


def check_memory_left(kv_memory: int) -> None:
    """Raises InvalidConfig if host memory does not suffice. Since pages take it when they are
    written, Linux would end some process then."""
    available = available_bytes()
    if kv_memory > available:
        message = f"pages take {_gib(kv_memory)}, and {_gib(available)} of memory are left"
        raise InvalidConfig(message, field="kv_memory")


def stored_dtype(kv_dtype: KvDtype, model: torch.dtype) -> torch.dtype:
    """The dtype of pages, for a model that computes in dtype `model`."""
    return {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}.get(kv_dtype, model)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

"""Pages of a GPU on their way to page-locked memory and back, beside work on the GPU."""

from __future__ import annotations

import pytest
import torch
from pools import CUDA

from baton.engine.page_memory import CudaMemory, page_memory

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

PAGES, ROWS = 64, 16


def test_pages_come_back_bit_by_bit_while_the_gpu_works() -> None:
    kv = torch.randn(PAGES, 8, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    before = kv.clone()
    memory = page_memory(kv, ROWS)
    assert isinstance(memory, CudaMemory)
    work = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        work = torch.tanh(work @ work)
    memory.copy([(page, page % ROWS) for page in range(8, 8 + ROWS)])
    for page in range(8, 8 + ROWS):
        assert memory.row(page % ROWS).tobytes() == _bytes(before[page])
    kv[8 : 8 + ROWS] = 0
    torch.cuda.synchronize()
    for page in range(8, 8 + ROWS):
        memory.copy([(page, page % ROWS)], restore=True)
    assert torch.equal(kv, before)


def _bytes(page: torch.Tensor) -> bytes:
    return page.cpu().view(torch.uint8).numpy().tobytes()

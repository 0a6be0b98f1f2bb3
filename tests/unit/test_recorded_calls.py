"""Calls of compiled code, recorded: what a process pays for it, and what cannot be repeated."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forks import fork
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.panels import Panels
from baton.kernels.cpu.recording import CallRecording


@pytest.mark.skipif(not compiler.available(), reason="needs compiled kernels")
def test_a_recording_does_not_import_torchs_compiler() -> None:
    process = fork(_record, ())
    process.join()
    assert process.exitcode == 0


def _record() -> None:
    with CallRecording() as recording:
        torch.zeros(2).new_empty(3)
    assert recording.foreign == {"aten::zeros"}
    assert "torch._dynamo" not in sys.modules


def test_what_views_memory_may_be_recorded_and_what_copies_it_may_not() -> None:
    with torch.inference_mode():
        x = torch.zeros(2, 6)
        with CallRecording() as recording:
            x[:, :3].view(2, 3).transpose(0, 1).unsqueeze(0)
            x.contiguous().reshape(12).chunk(2)
        assert recording.foreign == set()
        with CallRecording() as recording:
            x[:, :3].contiguous()
        assert recording.foreign == {"aten::contiguous"}


@pytest.mark.skipif(not compiler.available(), reason="needs compiled kernels")
def test_a_repetition_uses_the_buffers_of_its_recording_after_these_were_replaced() -> None:
    """In a thread of its own, whose buffer is as large as its calls needed so far."""
    with ThreadPoolExecutor(1) as thread:
        found, repeated = thread.submit(_repeated_after_growth).result()
    assert all(map(torch.equal, found, repeated))


@torch.inference_mode()
def _repeated_after_growth() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    sizes = [64, 1 << 14, 1 << 16]
    products = [Panels(torch.randn(128, size), None) for size in sizes]
    rows = [torch.randn(4, size) for size in sizes]
    with CallRecording() as recording:
        found = [each.product(x, None) for each, x in zip(products, rows, strict=True)]
    assert not recording.foreign
    exact = [each.clone() for each in found]
    Panels(torch.randn(128, 1 << 18), None).product(torch.randn(64, 1 << 18), None)
    for each in found:
        each.zero_()
    recording.repeat()
    return exact, found

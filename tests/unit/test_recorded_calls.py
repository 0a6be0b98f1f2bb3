"""Calls of compiled code, recorded: what a process pays for it, and what cannot be repeated."""

from __future__ import annotations

import sys

import pytest
import torch
from forks import fork

from baton.kernels.cpu import compiler
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

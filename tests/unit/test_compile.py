"""Kernels are compiled before anything is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_models import TINY_MODELS, save
from triton.runtime.jit import JITFunction

from baton.kernels.gpu.compile import compiling

SCRIPT = Path(__file__).parents[1] / "support" / "compiled_kernels.py"


def kernel(pointer: object) -> None:
    """Is never compiled."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with each call of a kernel."""
    done: list[str] = []

    def run(self: object, *args: object, grid: object, warmup: bool) -> None:
        done.append("compiled" if warmup else "launched")

    monkeypatch.setattr(JITFunction, "run", run)
    return done


def test_a_thread_that_compiles_launches_nothing_and_others_launch_as_always(
    launches: list[str],
) -> None:
    function = JITFunction(kernel)
    with compiling():
        function[(1,)](0)
        other = threading.Thread(target=lambda: function[(1,)](0))
        other.start()
        other.join()
    function[(1,)](0)
    assert launches == ["compiled", "launched", "launched"]


def test_an_error_ends_the_compilation_mode(launches: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), compiling():
        raise ZeroDivisionError
    JITFunction(kernel)[(1,)](0)
    assert launches == ["launched"]


@pytest.mark.parametrize("name", ["smollm3", "qwen2-moe"])
def test_few_layers_have_the_kernels_of_all(tmp_path: Path, name: str) -> None:
    save(TINY_MODELS[name].changed(num_hidden_layers=5), tmp_path)
    script = [sys.executable, str(SCRIPT), str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ran = subprocess.run(script, check=True, capture_output=True, env=environment)
    found = json.loads(ran.stdout)
    assert len(found["ahead"]) == len(set(found["ahead"])) > 20
    assert found["later"] == []

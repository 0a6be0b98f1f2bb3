"""Kernels are compiled before anything is launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TINY_MODELS, save
from triton.runtime.jit import JITFunction

from baton.kernels.gpu.compile import compiling

SCRIPT = Path(__file__).parents[1] / "support" / "compiled_kernels.py"
KERNELS = Path(__file__).parents[2] / "kernels" / "gpu"
LATENTS = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32}
"""Multiples of 16, as those of real models: kernels are compiled for these and for others."""

MODELS: dict[str, dict[str, int]] = {"smollm3": {}, "qwen2-moe": {}, "deepseek-v3": LATENTS}


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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What compiled_kernels.py prints, with the models' names for their folders."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        save(TINY_MODELS[name].changed(num_hidden_layers=5, **MODELS[name]), folder)
    script = [sys.executable, str(SCRIPT), *map(str, folders.values())]
    own = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(script, capture_output=True, env={**os.environ, **own}, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    return found | {"models": {name: found["models"][str(folders[name])] for name in MODELS}}


@pytest.mark.parametrize("name", MODELS)
def test_few_layers_have_the_kernels_of_all(found: Any, name: str) -> None:
    kernels = found["models"][name]
    assert len(kernels["ahead"]) == len(set(kernels["ahead"])) > 20
    assert kernels["later"] == []


def test_every_kernel_has_types_that_fit(found: Any) -> None:
    """The interpreter knows no types: only the compiler finds what does not fit."""
    launched = {
        f"baton.kernels.gpu.{path.stem}.{kernel}"
        for path in KERNELS.glob("*.py")
        for kernel in re.findall(r"^ +(_\w+)\[\(", path.read_text(), re.MULTILINE)
    }
    assert len(launched) > 30
    assert sorted(launched - set(found["translated"])) == []

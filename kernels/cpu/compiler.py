"""Compiles the code of `kernels.cpu.ir_builder` and runs it on torch's own threads.

The threads are those of torch's OpenMP runtime: a second pool would spin against the first.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llvmlite import ir

log = logging.getLogger(__name__)


class Library:
    """Machine code of one module."""

    def __init__(self, module: ir.Module) -> None:
        from llvmlite import binding

        parsed = binding.parse_assembly(str(module))
        target = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(),
            features=binding.get_host_cpu_features().flatten(),
            opt=3,
        )
        # Loops are final as written: nothing is unrolled or vectorized.
        options = binding.create_pipeline_tuning_options(speed_level=2)
        options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
        passes = binding.create_pass_builder(target, options)
        passes.getModulePassManager().run(parsed, passes)
        self._machine = binding.create_mcjit_compiler(parsed, target)
        self._machine.finalize_object()
        _libraries.append(self)

    def address(self, name: str) -> int:
        return int(self._machine.get_function_address(name))


_libraries: list[Library] = []
"""Never freed, since addresses are handed out: also the loser of two threads that compile the
same at once."""


def run(work: int, arguments: ctypes.Structure, *, alone: bool = False) -> None:
    """Calls the compiled function at `work` on each of torch's threads, or on this one alone."""
    if alone:
        _function(work)(ctypes.byref(arguments))
    else:
        _parallel()(work, ctypes.byref(arguments), torch.get_num_threads(), 0)


@functools.cache
def _function(address: int) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


class _Scratch(threading.local):
    """A thread's buffer, for the duration of a call."""

    buffer = torch.empty(0)
    numbers = 0


_scratch = _Scratch()


def scratch(*sizes: int) -> list[int]:
    """Addresses of buffers of these many float32, valid until this thread's next call.

    The buffer is reused: an allocation by torch takes longer than a small product.
    """
    starts = list(itertools.accumulate(sizes, initial=0))
    if starts[-1] > _scratch.numbers:
        _scratch.buffer, _scratch.numbers = torch.empty(starts[-1]), starts[-1]
    base = _scratch.buffer.data_ptr()
    return [base + 4 * start for start in starts[:-1]]


def suits(tensor: Tensor) -> bool:
    """Whether compiled code supports this type and device."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and available()


@functools.cache
def available() -> bool:
    """Whether this process can compile; logs why not."""
    reason = _obstacle()
    if reason:
        log.info("decoding with torch's own kernels: %s", reason)
    return reason is None


def _obstacle() -> str | None:
    if platform.machine() not in ("aarch64", "arm64"):
        return f"compiled kernels are for 64-bit Arm, not {platform.machine()}"
    try:
        from llvmlite import binding
    except ImportError:
        return "llvmlite is not installed"
    if _openmp() is None:
        return "torch's GNU OpenMP runtime was not found"
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return None


@functools.cache
def _parallel() -> Callable[..., None]:
    runtime = _openmp()
    assert runtime is not None
    function = runtime.GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The runtime that torch has loaded: its own, or the only one."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    found = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    torchs = {path for path in found if path.startswith(str(Path(torch.__file__).parent))}
    paths = torchs or found
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None

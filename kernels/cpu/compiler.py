"""Compiles the code of `kernels.cpu.ir_builder` and runs it on torch's own threads.

The threads are those of torch's OpenMP runtime: a second pool would compete with it for cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from baton.kernels import huge_pages
from baton.kernels.cpu import code_cache

if TYPE_CHECKING:
    from llvmlite import ir
    from llvmlite.binding import TargetMachine

    from baton.kernels.cpu.recording import CallRecording

log = logging.getLogger(__name__)


class Registers(NamedTuple):
    """This CPU's vector registers."""

    lanes: int  # float32 numbers in one
    number: int


NEON, AVX2, AVX512 = Registers(4, 32), Registers(8, 16), Registers(16, 32)


@functools.cache
def registers() -> Registers:
    """The vector registers that code is compiled for."""
    if _is_arm():
        return NEON
    return AVX512 if _features().get("avx512f") else AVX2


@functools.cache
def lanes_for(head_dim: int, registers: Registers) -> int:
    """Lanes of vectors that divide a head evenly; 0 if none do."""
    lanes = [lanes for lanes in (16, 8, 4) if head_dim % lanes == 0]
    return max((each for each in lanes if each <= registers.lanes), default=0)


# Loops are written as they should run.
PASSES = {"loop_unrolling": False, "loop_vectorization": False, "slp_vectorization": False}
LEVEL = 3

FEW_ROWS = 8
"""Up to this many rows of a short operation one thread is faster: it ends before another could
start."""


class Library:
    """Machine code of the module that `write(*parameters)` returns. `write` must depend on nothing
    else."""

    def __init__(self, write: Callable[..., ir.Module], *parameters: object) -> None:
        from llvmlite import binding

        code = binding.ObjectFileRef.from_data(_machine_code(write, parameters))
        self._machine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target())
        self._machine.add_object_file(code)
        self._machine.finalize_object()
        _libraries.append(self)

    def address(self, name: str) -> int:
        return int(self._machine.get_function_address(name))


_libraries: list[Library] = []
"""Keeps every library alive, since callers hold addresses. Two threads may compile the same one."""


def _machine_code(write: Callable[..., ir.Module], parameters: tuple[object, ...]) -> bytes:
    """An object file for this CPU, compiled now or by an earlier process.

    The cache key is made of the module's inputs: writing a module takes longer than loading its
    code.
    """
    made_of = (_host(), source_digest(), write.__module__, write.__qualname__, parameters)
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()
    code = code_cache.load(key)
    if code is None:
        code = _compile(str(write(*parameters)))
        code_cache.store(key, code)
    return code


@functools.cache
def source_digest() -> str:
    """A digest of this package, which writes all modules, and of the parent package, from which it
    imports the layouts of codes."""
    here = Path(__file__).parent
    files = sorted((*here.glob("*.py"), *here.parent.glob("*.py")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _compile(assembly: str) -> bytes:
    from llvmlite import binding

    parsed, target = binding.parse_assembly(assembly), _target()
    options = binding.create_pipeline_tuning_options()
    for name, value in PASSES.items():
        setattr(options, name, value)
    passes = binding.create_pass_builder(target, options)
    passes.getModulePassManager().run(parsed, passes)
    return bytes(target.emit_object(parsed))


def _target() -> TargetMachine:
    from llvmlite import binding

    _, triple, cpu, features = _host()
    target = binding.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=LEVEL)


def _host() -> tuple[str, str, str, str]:
    """The compiler's version and this CPU, on which machine code depends beside its assembly."""
    import llvmlite
    from llvmlite import binding

    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    if has_dot():  # LLVM derives it from the CPU's name only
        features += ",+dotprod"
    return llvmlite.__version__, binding.get_default_triple(), cpu, features


def run(work: int, arguments: ctypes.Structure, *, alone: bool = False) -> None:
    """Calls the compiled function at `work` on each of torch's threads, or on this one alone."""
    if _scratch.recording is not None:
        _scratch.recording.add(work, arguments, alone=alone)
    if alone:
        _function(work)(ctypes.byref(arguments))
    else:
        _parallel()(work, ctypes.byref(arguments), torch.get_num_threads(), 0)


@functools.cache
def _function(address: int) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


class _Scratch(threading.local):
    """A thread's buffer, used during a call, and the recording that its calls are added to."""

    buffer = torch.empty(0)
    numbers = 0
    recording: CallRecording | None = None


_scratch = _Scratch()


def start_recording(recording: CallRecording) -> None:
    """Adds this thread's calls, and the buffers that they use, to `recording` from now on."""
    _scratch.recording = recording
    recording.keep(_scratch.buffer)


def end_recording() -> None:
    _scratch.recording = None


def scratch(*sizes: int) -> list[int]:
    """Addresses of buffers for `sizes` float32 each, valid until this thread's next call.

    The memory is reused: an allocation by torch takes longer than a small product.
    """
    starts = list(itertools.accumulate(sizes, initial=0))
    if starts[-1] > _scratch.numbers:
        _scratch.buffer = huge_pages.zeros((starts[-1],), torch.float32)
        _scratch.numbers = starts[-1]
        if _scratch.recording is not None:
            _scratch.recording.keep(_scratch.buffer)
    base = _scratch.buffer.data_ptr()
    return [base + 4 * start for start in starts[:-1]]


def suits(dtype: torch.dtype, device: torch.device) -> bool:
    """True if compiled code supports this type and device."""
    if device.type != "cpu" or not available():
        return False
    return dtype in (torch.float32, torch.bfloat16)


@functools.cache
def available() -> bool:
    """True if this process can compile; otherwise logs why not."""
    reason = _obstacle()
    if reason:
        log.info("torch's own kernels are used, whose last bits depend on the batch: %s", reason)
    return reason is None


def describe() -> str:
    """Says which kernels this process uses, or why it uses torch's."""
    if reason := _obstacle():
        return f"torch's own kernels, since {reason}"
    if _is_arm():
        return f"kernels compiled for Arm{' with dot products' * has_dot()}"
    vectors = "AVX-512" if registers() == AVX512 else "AVX2"
    kinds = {"VNNI": has_byte_dot(), "AMX": has_amx() or has_integer_amx()}
    return " and ".join(
        (f"kernels compiled for {vectors}", *(k for k, has in kinds.items() if has))
    )


def _obstacle() -> str | None:
    if not _is_arm() and platform.machine() not in ("x86_64", "AMD64"):
        return f"there are no compiled kernels for {platform.machine()}"
    try:
        from llvmlite import binding
    except ImportError:
        return "llvmlite is not installed"
    if not _is_arm() and not (_features().get("avx2") and _features().get("fma")):
        return "this CPU has no AVX2 and FMA"
    if _openmp() is None:
        return "torch's GNU OpenMP runtime was not found"
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return None


def _is_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


@functools.cache
def has_dot() -> bool:
    """True if this CPU adds up four products of int8 per lane (Arm's SDOT)."""
    known = Path("/proc/cpuinfo")
    return _is_arm() and known.exists() and "asimddp" in known.read_text().split()


@functools.cache
def has_byte_dot() -> bool:
    """True if this CPU does so with unsigned and signed bytes (AVX-512's VPDPBUSD)."""
    return not _is_arm() and registers() == AVX512 and bool(_features().get("avx512vnni"))


@functools.cache
def has_amx() -> bool:
    """True if this process may use tile registers for bfloat16."""
    return _has_tiles("amx-bf16")


@functools.cache
def has_integer_amx() -> bool:
    """True if this process may use tile registers for bytes."""
    return has_byte_dot() and _has_tiles("amx-int8")


def _has_tiles(kind: str) -> bool:
    if _is_arm() or not (_features().get(kind) and _features().get("avx512f")):
        return False
    from baton.kernels.cpu import amx

    return amx.permitted()


def multiplies_bfloat16() -> bool:
    """True if this CPU is faster in bfloat16 than in float32."""
    return available() and (has_amx() or rounds_to_bfloat16())


@functools.cache
def rounds_to_bfloat16() -> bool:
    """True if this CPU has an instruction for it; otherwise LLVM would call a library."""
    return not _is_arm() and bool(_features().get("avx512bf16"))


@functools.cache
def _features() -> dict[str, bool]:
    from llvmlite import binding

    return dict(binding.get_host_cpu_features())


@functools.cache
def _parallel() -> Callable[..., None]:
    runtime = _openmp()
    assert runtime is not None
    function = runtime.GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@functools.cache
def openmp_function(name: str) -> int | None:
    """The address of a function of torch's OpenMP runtime."""
    return ctypes.cast(getattr(_openmp(), name), ctypes.c_void_p).value


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded: its own copy, or the only one in the process."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    found = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    torchs = {path for path in found if path.startswith(str(Path(torch.__file__).parent))}
    paths = torchs or found
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None

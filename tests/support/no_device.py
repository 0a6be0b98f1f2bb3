"""A Hopper that is not there, for scripts that compile kernels without a GPU.

Triton must not interpret.
"""

from __future__ import annotations

import ast
import functools

import torch
import triton.compiler
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime import cache
from triton.runtime.jit import JITCallable

HOPPER = GPUTarget("cuda", 90, 32)


_parsed = functools.cache(ast.parse)


def hurry() -> None:
    """Spares Triton what takes long and changes nothing in a process that keeps no results: the
    hash of its own library, and to parse a function again wherever it is called."""
    cache.triton_key = lambda: ""
    JITCallable.parse = lambda function: _parsed(function._src)


class Driver:
    """A driver of no device."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def multiply(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.mm, but for the numbers: a CPU takes long for those."""
    return x.new_empty(len(x), weight.shape[1]) if out is None else out


def multiply_batches(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.bmm, likewise."""
    return x.new_empty(len(x), x.shape[1], y.shape[2]) if out is None else out


class Translation:
    """Stands in for the compiler: makes each kernel's first representation alone, with all types
    and shapes checked, which needs neither LLVM nor an assembler.

    Of one kernel's sizes it makes only some: truth values decide most branches.
    """

    def __init__(self) -> None:
        self.kernels: set[str] = set()  # as module.name
        self._backend = make_backend(HOPPER)
        self._done: set[tuple[object, ...]] = set()
        triton.compiler.compile = self._translate

    def _translate(self, source: ASTSource, options: dict[str, object], **_: object) -> object:
        types = tuple(kind for kind in source.signature.values() if kind != "constexpr")
        choices = tuple(_choice(value) for _, value in sorted(source.constants.items()))
        kernel = f"{source.fn.fn.__module__}.{source.name}"
        if (kernel, types, choices) not in self._done:
            self._make(source, options)
            self._done.add((kernel, types, choices))
            self.kernels.add(kernel)
        return object()

    def _make(self, source: ASTSource, options: dict[str, object]) -> None:
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        parsed = self._backend.parse_options({**options, **source.parse_options()})
        generators = self._backend.get_codegen_implementation(parsed)
        source.make_ir(HOPPER, parsed, generators, self._backend.get_module_map(), context)


def _choice(value: object) -> object:
    """What of a compile-time argument decides between branches."""
    return value > 1 if type(value) is int else str(value)

"""Records calls of compiled code and repeats them as one call: without Python in between, and on
threads that meet between calls instead of being started for each.

A repetition reads and writes the same memory. Inputs that differ from step to step must be written
there before it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llvmlite import ir
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.ir_builder import POINTER, Arguments, Count, Function, number

SPINS = 2000
"""How often a waiting thread reads the counter before it yields its core: with 10,000, a step
beside two busy processes took ten times as long."""


class _Call(ctypes.Structure):
    _fields_ = (
        ("work", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("alone", ctypes.c_int64),  # whether the first thread runs it alone
    )


class _Repetition(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("count_threads", ctypes.c_void_p),  # omp_get_num_threads
        ("yield_core", ctypes.c_void_p),  # sched_yield
        ("numbered", ctypes.c_int64),  # threads that have a number; 0 at first
        ("arrived", ctypes.c_int64),  # arrivals at the ends of calls, of all threads; 0 at first
    )


class CallRecording:
    """Records the calls of compiled code while it is entered."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, bool]] = []  # work, offset of its arguments, alone
        self._arguments = bytearray()  # copies made before each call
        self._torch = _TorchOperations()
        self._kept: list[Tensor] = []

    @property
    def foreign(self) -> set[str]:
        """Operations that torch computed between the calls: a repetition would omit them."""
        return self._torch.computed

    def add(self, work: int, arguments: ctypes.Structure, *, alone: bool) -> None:
        self._calls.append((work, len(self._arguments), alone))
        self._arguments += bytes(arguments)

    def keep(self, buffer: Tensor) -> None:
        """Keeps memory that the calls use for as long as they may be repeated."""
        self._kept.append(buffer)

    def __enter__(self) -> CallRecording:
        compiler.start_recording(self)
        self._torch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._torch.__exit__(*error)  # type: ignore[no-untyped-call]
        compiler.end_recording()
        self._first = bytes(self._arguments)
        self._memory = (ctypes.c_char * len(self._first))()
        base = ctypes.addressof(self._memory)
        calls = [_Call(work, base + place, alone) for work, place, alone in self._calls]
        self._table = (_Call * len(calls))(*calls)

    def repeat(self) -> None:
        """Makes all calls again."""
        ctypes.memmove(self._memory, self._first, len(self._first))
        arguments = _Repetition(
            ctypes.addressof(self._table),
            len(self._table),
            compiler.openmp_function("omp_get_num_threads"),
            _yield_core(),
        )
        compiler.run(_repeat(), arguments)


@functools.cache
def _yield_core() -> int | None:
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value


class _TorchOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the memory that torch allocates, and records the operations that it computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: set[str] = set()
        self._allocated: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """With True, torch would import its compiler at the first recording, which takes 1.6 s."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found, schema = func(*args, **(kwargs or {})), func._schema
        if schema.name in ("aten::empty", "aten::new_empty"):
            self._allocated.append(found)
        elif not (schema.returns and all(map(_may_view, schema.returns)) and _views(found, args)):
            self.computed.add(schema.name)
        return found


def _may_view(returned: Any) -> bool:
    return bool(returned.alias_info and not returned.alias_info.is_write)


def _views(found: Any, args: Any) -> bool:
    """True if the result shares the arguments' memory. `contiguous` and `reshape` may view or copy
    it, and in inference mode they are dispatched as such."""
    given = {_memory(each) for each in args if isinstance(each, Tensor)}
    return all(_memory(each) in given for each in ([found] if isinstance(found, Tensor) else found))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@functools.cache
def _repeat() -> int:
    return Library(_module).address("repeat")


def _module() -> ir.Module:
    module = ir.Module("recording")
    code = Function(module, "repeat", [POINTER], exported=True)
    given = Arguments(code.arguments[0], _Repetition)
    builder = code.builder
    counted = ir.FunctionType(ir.IntType(32), [])
    threads = Count(
        builder,
        builder.sext(_called(builder, given, "count_threads", counted), ir.IntType(64)),
    )
    mine = builder.atomic_rmw("add", given.field("numbered").value, number(1), "monotonic")
    is_first = builder.icmp_unsigned("==", mine, number(0))
    with code.loop(0, given.count("count")) as index:
        call = Arguments(
            given.memory("calls", ir.IntType(8)).from_(index * ctypes.sizeof(_Call)), _Call
        )
        shared = call.count("alone").compare("==", 0)
        with code.when(builder.or_(is_first, shared)):
            work = ir.FunctionType(ir.VoidType(), [POINTER])
            _called(builder, call, "work", work, call.memory("arguments").value)
        _meet(code, given, (index + 1) * threads)
    code.end()
    return module


class _Callee:
    """A function at an address that compiled code has loaded, with the type that opaque pointers
    lack."""

    def __init__(self, address: ir.Value, kind: ir.FunctionType) -> None:
        self.function_type, self.type, self._address = kind, address.type, address

    def get_reference(self) -> str:
        return str(self._address.get_reference())


def _called(
    builder: ir.IRBuilder, given: Arguments, name: str, kind: ir.FunctionType, *values: ir.Value
) -> ir.Value:
    return builder.call(_Callee(given.memory(name).value, kind), values)


def _meet(code: Function, given: Arguments, all_arrived: Count) -> None:
    """Waits until `arrived` has reached `all_arrived`."""
    builder, counter = code.builder, given.field("arrived").value
    builder.atomic_rmw("add", counter, number(1), "acq_rel")
    before = builder.block
    head, again, slow, after = (builder.append_basic_block() for _ in range(4))
    builder.branch(head)
    builder.position_at_end(head)
    spins = builder.phi(ir.IntType(64))
    spins.add_incoming(number(0), before)
    arrived = builder.load_atomic(counter, "acquire", 8, typ=ir.IntType(64))
    builder.cbranch(builder.icmp_signed(">=", arrived, all_arrived.value), after, again)
    builder.position_at_end(again)
    looked = builder.add(spins, number(1))
    spins.add_incoming(looked, again)
    builder.cbranch(builder.icmp_signed("<", looked, number(SPINS)), head, slow)
    builder.position_at_end(slow)
    _called(builder, given, "yield_core", ir.FunctionType(ir.IntType(32), []))
    spins.add_incoming(number(SPINS), slow)
    builder.branch(head)
    builder.position_at_end(after)

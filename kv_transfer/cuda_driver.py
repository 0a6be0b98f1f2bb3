"""CUDA memory that other processes of the host can map, through the driver's own library.

The driver belongs to the machine, not to a Python package, so this works with
any build of torch. The calling thread must have a CUDA context: torch gives it
one with `torch.cuda.set_device` and the first stream.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class DriverError(Exception):
    """What the driver answered, in its words."""


class SharedMemory(NamedTuple):
    """Memory as another process is told of it."""

    handle: bytes  # of the whole allocation
    offset: int  # where in it the memory begins


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def share(address: int) -> SharedMemory:
    """A handle of the allocation that `address` is in. torch may have put more into it."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return SharedMemory(bytes(handle), address - base.value)


def map_shared(handle: bytes) -> int:
    """The address, in this process, of an allocation that another process shares."""
    if len(handle) != ctypes.sizeof(_Handle):
        raise DriverError(f"a handle of {len(handle)} bytes is none")
    base = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(base),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    return base.value


def unmap_shared(base: int) -> None:
    """Ends what `map_shared` began. No kernel may be using the memory any more."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverError(f"there is no CUDA driver: {error}") from error


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise DriverError(f"{name}: {words} ({code})")

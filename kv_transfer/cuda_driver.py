"""CUDA memory shared between processes of a host, through the driver's own library.

Works with any build of torch. The calling thread must have a CUDA context, which
it gets from `torch.cuda.set_device` and its first stream.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class DriverError(Exception):
    """An error of the CUDA driver, with its message."""


class SharedMemory(NamedTuple):
    """How another process maps some memory."""

    handle: bytes  # of the whole allocation
    offset: int  # where in it the memory begins


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def share(address: int) -> SharedMemory:
    """Shares the allocation that contains `address`, with whatever else torch has in it."""
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
        raise DriverError(f"a handle cannot have {len(handle)} bytes")
    base = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(base),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    return base.value


def unmap_shared(base: int) -> None:
    """Undoes `map_shared`. No kernel may use the memory any more."""
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
        message = text.value.decode() if text.value else "unknown error"
        raise DriverError(f"{name}: {message} ({code})")

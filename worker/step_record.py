"""The step record: which requests a worker's process computes, in a file that outlives it.

    open_record ─▶ running ─▶ close after an orderly end or a failed start: removes the files
                      └─ any other end ─▶ a process of the same scope judges them: a Verdict

Under Ray, a scope is a cluster: its workers on a node look for each other's records once a second.
Without Ray, a scope is one worker, whose next process looks.

The engine thread notes the rows of a step before its launch, and that the step has settled. It does
the same for a request that it accepts. How the process ended is evidence too:

    an exception            its text is in the record
    SIGSEGV, SIGABRT, …     faulthandler has written the stack into a second file
    out of memory           the kernel's count of such kills grew in the last second
    none of these           killed from outside: no request is accused

The record is a memory-mapped file, so noting a step copies a few bytes, which the kernel keeps
however the process ends. This module does not import torch, since a new process reads records
before anything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import mmap
import os
import secrets
import struct
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from baton.core.host_memory import own_group
from baton.core.types import Work
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

STALE_SECONDS = 3600.0
"""How long an unread record is kept after the end of its process."""

REMEMBERED_VERDICTS = 16

_HEADER = struct.Struct("<8sQqI")  # format, incarnation, out-of-memory kills, length of the text
_OOM_KILLS, _OOM_KILLS_AT = struct.Struct("<q"), 16
_FORMAT = b"baton/1\0"
_TEXT_BYTES = 2000
_SLOT = struct.Struct("<II")  # whether it is in use, length
_SLOT_BYTES = 1 << 16
_SLOTS_AT = 4096
_ACCEPTING = 2  # the slot of the request being accepted; slots 0 and 1 are for steps in flight
_SIZE = _SLOTS_AT + (_ACCEPTING + 1) * _SLOT_BYTES


class Row(Protocol):
    """A sequence of a step."""

    @property
    def work(self) -> Work: ...


class StepRecord:
    """`verdicts` has the latest verdicts on other processes of its scope. Without a file, as in
    tests, no other process can read the record."""

    def __init__(self, memory: mmap.mmap | None = None, path: Path | None = None) -> None:
        self.incarnation = secrets.randbits(64)
        self.verdicts: deque[pb.Verdict] = deque(maxlen=REMEMBERED_VERDICTS)
        self.memory = memory or mmap.mmap(-1, _SIZE)
        self._path = path
        self._begun = self._ended = 0  # steps
        self._rows: list[Sequence[Row]] = [(), ()]  # by slot
        _HEADER.pack_into(self.memory, 0, _FORMAT, self.incarnation, -1, 0)

    def begin(self, rows: Sequence[Row]) -> None:
        """Notes the rows of a step before its launch. At most two steps are in flight."""
        slot = self._begun & 1
        self._begun += 1
        # Most steps have the rows of the one before.
        if rows != self._rows[slot]:
            self._rows[slot] = rows
            self._note(slot, [row.work.key.request_id for row in rows])
        self.memory[_SLOTS_AT + slot * _SLOT_BYTES] = 1

    def end(self) -> None:
        """Notes that the oldest step in flight has settled."""
        self.memory[_SLOTS_AT + (self._ended & 1) * _SLOT_BYTES] = 0
        self._ended += 1

    @contextlib.contextmanager
    def accepting(self, request_id: str) -> Iterator[None]:
        """Notes a request while it is prepared, for example its grammar."""
        self._note(_ACCEPTING, [request_id])
        self.memory[_SLOTS_AT + _ACCEPTING * _SLOT_BYTES] = 1
        yield
        self.memory[_SLOTS_AT + _ACCEPTING * _SLOT_BYTES] = 0

    def refresh(self) -> None:
        """Called once a second. Notes the count of out-of-memory kills, since earlier ones hit
        other processes, and touches the file, so that its time is the end of this process."""
        _OOM_KILLS.pack_into(self.memory, _OOM_KILLS_AT, _oom_kills())
        if self._path:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def crash(self, error: BaseException) -> None:
        """Notes the error that ends the process. Only the first counts, as the cause."""
        *header, length = _HEADER.unpack_from(self.memory)
        if not length:
            text = f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES]
            self.memory[_HEADER.size : _HEADER.size + len(text)] = text
            _HEADER.pack_into(self.memory, 0, *header, len(text))

    def judge_others(self) -> None:
        """Judges and removes the records of processes that have ended."""
        if self._path:
            scope = self._path.name.partition("@")[0]
            records = self._path.parent.glob(f"{scope}@*.steps")
            self.verdicts.extend(filter(None, map(_take, records)))

    def close(self) -> None:
        """Removes the files after an orderly end or a failed start."""
        if self._path:
            _remove(self._path)

    def _note(self, slot: int, request_ids: list[str]) -> None:
        text = "\0".join(request_ids).encode()
        if len(text) > _SLOT_BYTES - _SLOT.size:
            text = b""  # names no request, so it acquits none
        start = _SLOTS_AT + slot * _SLOT_BYTES
        _SLOT.pack_into(self.memory, start, 0, len(text))
        start += _SLOT.size
        self.memory[start : start + len(text)] = text


def open_record(scope: str) -> StepRecord:
    """Opens this process's record and judges those of ended processes of its scope on this node.
    From now on a fatal signal writes its stack beside the record."""
    try:
        return _open(quote(scope, safe=""))
    except OSError as error:
        log.warning("no step record: %s; if this worker ends, its requests are suspects", error)
        return StepRecord()


def judge(memory: mmap.mmap | bytes, fault: str, oom_kills: int) -> pb.Verdict:
    """Returns the verdict on an ended process. `fault` is faulthandler's output, `oom_kills` the
    kernel's count now."""
    _, incarnation, kills_before, length = _HEADER.unpack_from(memory)
    verdict = pb.Verdict(incarnation=incarnation, crashed=True)
    if length:
        verdict.ended = bytes(memory[_HEADER.size : _HEADER.size + length]).decode(errors="replace")
    elif fault:
        verdict.ended = fault.partition("\n")[0]
    elif oom_kills > kills_before >= 0:
        verdict.ended = "the kernel ended it, or another process, for lack of memory"
    else:
        verdict.ended, verdict.crashed = "it was killed from outside", False
    # If another Python thread than the engine's crashed, the rows did not cause it.
    elsewhere = "  File " in fault and "engine_thread.py" not in fault
    if verdict.crashed and not elsewhere:
        slots = range(_ACCEPTING + 1)
        verdict.suspects.extend({name for slot in slots for name in _noted(memory, slot)})
    return verdict


def _noted(memory: mmap.mmap | bytes, slot: int) -> list[str]:
    start = _SLOTS_AT + slot * _SLOT_BYTES
    used, length = _SLOT.unpack_from(memory, start)
    start += _SLOT.size
    text = bytes(memory[start : start + length]).decode(errors="replace")
    return text.split("\0") if used and text else []


def _open(scope: str) -> StepRecord:
    folder = _folder()
    for path in folder.glob("*.steps"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - STALE_SECONDS:
                _take(path)
    path = folder / f"{scope}@{secrets.token_hex(8)}.steps"
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    os.posix_fallocate(descriptor, 0, _SIZE)  # noting a step must not run out of memory
    record = StepRecord(mmap.mmap(descriptor, _SIZE), path)
    record.refresh()
    faulthandler.enable(path.with_suffix(".fault").open("w"), all_threads=False)
    # Linked only when locked: an unlocked record means that its process has ended.
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # until this process ends, in whatever way
    # os.link follows the link in /proc only if it gets a `src_dir_fd`, whichever it is.
    os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
    record.judge_others()
    return record


def _take(path: Path) -> pb.Verdict | None:
    """Judges and removes the record of a process that has ended. Returns None if the process
    lives or another one has judged the record."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fault = path.with_suffix(".fault").read_text(errors="replace")
        memory = file.read()
        _remove(path)
        if memory.startswith(_FORMAT):
            verdict = judge(memory, fault, _oom_kills())
            log.warning("a worker's process has ended: %s\n%s", verdict.ended, fault)
            return verdict
    return None


def _remove(path: Path) -> None:
    for each in (path.with_suffix(".fault"), path):
        each.unlink(missing_ok=True)


def _folder() -> Path:
    """The folder of records, in memory where possible: a step must never wait for a disk."""
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    folder = root / f"baton-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _oom_kills() -> int:
    """Returns the number of out-of-memory kills in this control group, or else on this host; -1 if
    unknown."""
    for path in (own_group() / "memory.events", Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return -1

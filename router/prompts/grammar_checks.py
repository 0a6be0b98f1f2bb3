"""Checks structures in a process of its own: a few bytes can end llguidance's process, since it
recurses natively, for some integers without end.

The process starts with the first structure and ends with this one. It checks one structure at a
time. A structure that ends it, or that takes too long, is refused, and the next one gets a new
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

CHECK_SECONDS = 5.0
"""Time limit for a structure. Most take a millisecond."""

# By its path: it imports nothing of Baton, and -P keeps its folder out of the imports.
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("grammar_process.py")))


class GrammarChecks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._of_parent: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def check(self, kind: str, source: str) -> tuple[str, str]:
        """Returns the grammar in llguidance's form and what is wrong with it; one of them is
        empty."""
        asked = json.dumps([kind, source]).encode() + b"\n"
        with self._lock:
            process = self._running()
            try:
                return _parse(_exchange(process, asked))
            except TimeoutError:
                fault = f"checking it takes more than {CHECK_SECONDS:g} seconds"
            except (EOFError, BrokenPipeError):
                fault = "its rules are nested too deeply, or its numbers are too large"
            self._process = None
            _end(process)
        return "", fault

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # A signal to the router's group must not end it in the middle of an answer.
            self._process = subprocess.Popen(  # noqa: S603 (a constant)
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        return self._process

    def _leave_to_parent(self) -> None:
        """A fork has the pipes, but must not use them."""
        self._lock = threading.Lock()
        self._of_parent, self._process = self._process or self._of_parent, None


def _parse(answer: bytes) -> tuple[str, str]:
    grammar, fault = json.loads(answer)
    return grammar, fault


def _exchange(process: subprocess.Popen[bytes], asked: bytes) -> bytes:
    """Raises TimeoutError, and EOFError or BrokenPipeError if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    unsent, answer = memoryview(asked), b""
    deadline = time.monotonic() + CHECK_SECONDS
    with selectors.DefaultSelector() as ready:  # select() refuses the numbers of a busy router
        sending = ready.register(process.stdin, selectors.EVENT_WRITE)
        ready.register(process.stdout, selectors.EVENT_READ)
        while not answer.endswith(b"\n"):
            found = ready.select(max(0.0, deadline - time.monotonic()))
            if not found:
                raise TimeoutError
            for key, _ in found:
                if key is not sending:
                    answer += _read(key.fd)
                    continue
                with contextlib.suppress(BlockingIOError):
                    unsent = unsent[os.write(key.fd, unsent) :]
                if not unsent:
                    ready.unregister(process.stdin)
    return answer


def _read(pipe: int) -> bytes:
    if read := os.read(pipe, 2**16):
        return read
    raise EOFError


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes the pipes and waits
        pass

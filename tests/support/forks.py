"""Baton's processes: started as a user does, or forked from one that has imported torch.

Importing takes two seconds a process, most of a small cluster's start, so most tests fork.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preloaded"])
_starting = threading.Lock()
RANK = "baton.worker.rank_process"


class Started:
    """`python -m …`, optionally run by another command."""

    def __init__(self, before: Sequence[str], arguments: list[str], log: Path) -> None:
        with log.open("w") as output:
            self._popen = subprocess.Popen(
                [*before, sys.executable, "-m", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if it has not ended in that time."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Forked:
    """The same as `python -m …`."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        settings = (arguments, log, dict(os.environ))
        self._process = fork(_run, settings)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode


def fork(target: Callable[..., None], arguments: tuple[object, ...]) -> BaseProcess:
    """The first call starts the process to fork, with this environment."""
    process = _context.Process(target=_preloaded, args=(target, *arguments), daemon=True)
    with _starting:
        before = dict(os.environ)
        # Torch reads it once, at import.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
    return process


def _preloaded(target: Callable[..., None], *arguments: object) -> None:
    importlib.import_module("preloaded")  # a fork server hides that it could not import it
    target(*arguments)


def _run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    subprocess.Popen = ForkedRank  # type: ignore[misc]
    _become(arguments)


def _become(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class ForkedRank(subprocess.Popen[bytes]):
    """A rank forked from its worker, which has one thread beside the caller's at that time. Any
    other command is started as ever, and a rank where there are GPUs: they allow no forks."""

    def _execute_child(self, *arguments: Any) -> None:
        command, kept = arguments[0], sorted(arguments[4])
        if RANK not in command or importlib.import_module("torch").cuda.is_available():
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        self.pid = os.fork()
        self._child_created = True
        if not self.pid:
            gc.freeze()  # objects of the other threads must not close files that are opened here
            for before, after in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(before + 1, after)
            try:
                _become(command[2:])
            finally:
                os._exit(1)

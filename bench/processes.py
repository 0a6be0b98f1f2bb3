"""Baton's processes as a benchmark starts them, without Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 240.0
STOP_SECONDS = 30.0

FREE_ROUTER = {"port": 0, "http_port": 0, "metrics_port": 0, "canary_seconds": 0}
"""Of a router's settings: any ports that are free, and no requests of its own."""


@dataclass(frozen=True, slots=True)
class Process:
    log: Path
    pid: int


@contextlib.contextmanager
def process(
    folder: Path,
    name: str,
    module: str,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """Starts a process that ends with the block; yields its log."""
    with start(folder, name, module, *arguments, variables=variables) as started:
        yield started.log


@contextlib.contextmanager
def start(
    folder: Path,
    name: str,
    module: str,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """Starts a process that ends with the block."""
    log = folder / f"{name}.log"
    with log.open("w") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})},
        )
    try:
        yield Process(log, popen.pid)
    finally:
        popen.send_signal(signal.SIGINT)
        popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(STOP_SECONDS)
        popen.kill()


def address_in(log: Path) -> str:
    """The address in the log of a ready process."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if match := re.search(r"ready(?:: gRPC)? on (\S+:\d+)", log.read_text()):
            return match[1]
        time.sleep(0.1)
    raise SystemExit(f"{log.stem} did not start:\n{log.read_text()[-3000:]}")

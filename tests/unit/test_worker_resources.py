"""Priorities of threads, and the service that lets workers share a GPU.

The control program comes with NVIDIA's driver; here a script stands for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from baton.worker import resources


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """A control program that notes how it was called; its notes."""
    notes = folder / "notes"
    program = folder / resources.MPS_CONTROL
    note = f'echo "$CUDA_MPS_PIPE_DIRECTORY [$*] $(cat)" >> {notes}'
    program.write_text("\n".join(["#!/bin/sh", note, *lines]) + "\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return notes


def test_a_service_lasts_as_long_as_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = install(tmp_path, monkeypatch)
    with resources.mps_service(tmp_path / "pipes") as variables:
        assert variables["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "pipes")
        assert notes.read_text() == f"{tmp_path}/pipes [-d] \n"
    assert notes.read_text().splitlines()[1] == f"{tmp_path}/pipes [] quit -t 10"


def test_a_service_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(InvalidConfig, match=resources.MPS_CONTROL), resources.mps_service(tmp_path):
        pass


def test_a_machine_without_the_service_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidConfig, match=resources.MPS_CONTROL), resources.mps_service(tmp_path):
        pass


def test_a_priority_is_lowered_and_never_raised() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def nicenesses() -> Iterator[int]:
        for wanted in (own + 1, own, own + 2):
            resources.lower_priority(wanted)
            yield os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: list(nicenesses())).result()
    limit = 19
    assert found == [min(own + more, limit) for more in (1, 1, 2)]

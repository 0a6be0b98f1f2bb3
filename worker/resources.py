"""Sets how a worker uses its cores and its GPU.

Import this before torch, which reads its number of threads from the environment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import baton.engine  # noqa: F401 sets torch's memory options, before torch is imported
from baton.core.config import Config
from baton.core.errors import InvalidConfig
from baton.core.types import Role

MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
MPS_START_SECONDS = 10.0
MPS_STOP_SECONDS = 10.0


def claim_threads(config: Config, role: Role, ranks: int | None = None) -> int:
    """Sets and returns the number of compute threads of this process.

    A worker's `ranks` share its threads. A role switch keeps the number of ranks, which may
    differ from the new role's `tensor_parallel`.
    """
    section = config.pool(role)
    whole = section.threads or len(os.sched_getaffinity(0))
    threads = max(1, whole // (ranks or section.tensor_parallel))
    use_threads(threads)
    return threads


def use_threads(threads: int) -> None:
    """OpenMP reads this once, at its start. Ray sets it to 1."""
    os.environ["OMP_NUM_THREADS"] = str(threads)


def lower_priority(niceness: int) -> None:
    """Lowers the priority of the calling thread and of threads that it starts later. Never raises
    it, which may not be permitted."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(own, niceness))


@contextlib.contextmanager
def mps_service(folder: Path) -> Iterator[dict[str, str]]:
    """Runs NVIDIA's multi-process service (MPS) while the block runs.

    Without it a GPU time-slices between processes; with it their kernels run side by side, each
    within its part of the GPU (engine/gpu/device.py). Yields the environment variables that a
    process needs to join it, before CUDA starts.
    """
    variables = {MPS_FOLDER: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    try:
        _mps_control(variables, "-d", timeout=MPS_START_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"{MPS_CONTROL} cannot be started: {error}"
        raise InvalidConfig(message, field="gpu_share") from error
    try:
        yield variables
    finally:
        quit_ = f"quit -t {MPS_STOP_SECONDS:.0f}\n"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _mps_control(variables, commands=quit_, timeout=3 * MPS_STOP_SECONDS)


def _mps_control(
    variables: dict[str, str], *arguments: str, commands: str = "", timeout: float
) -> None:
    subprocess.run(
        [MPS_CONTROL, *arguments],
        env={**os.environ, **variables},
        input=commands,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=timeout,
    )

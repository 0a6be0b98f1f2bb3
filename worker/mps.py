"""Several workers on one GPU at the same time: NVIDIA's multi-process service (MPS).

Without it a GPU runs one process at a time and switches between them by the
clock. With it their kernels run side by side; engine/gpu/partition.py keeps each
to its part of the GPU.

A service is a daemon with a folder of its own. Whoever starts the workers starts
it; a worker joins it by its environment, before CUDA starts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from baton.core.errors import InvalidConfig

CONTROL = "nvidia-cuda-mps-control"
FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
START_SECONDS = 10.0
STOP_SECONDS = 10.0


@contextlib.contextmanager
def service(folder: Path) -> Iterator[dict[str, str]]:
    """Runs a service while the block does; the environment of processes that join it."""
    variables = {FOLDER: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    try:
        _control(variables, "-d", timeout=START_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise InvalidConfig(f"{CONTROL} cannot be started: {error}", field="gpu_share") from error
    try:
        yield variables
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _control(variables, commands=f"quit -t {STOP_SECONDS:.0f}\n", timeout=3 * STOP_SECONDS)


def _control(
    variables: dict[str, str], *arguments: str, commands: str = "", timeout: float
) -> None:
    subprocess.run(
        [CONTROL, *arguments],
        env={**os.environ, **variables},
        input=commands,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=timeout,
    )

"""deploy/smoke/multi_gpu.sh with CPUs for GPUs, and with this machine for both hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import Command

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "deploy" / "smoke" / "multi_gpu.sh"
VARIABLES = {"DEVICE": "cpu", "RANKS": "2", "UCX_TLS": "tcp"}


def table(*arguments: str) -> dict[str, str]:
    """The result of each check."""
    command = ["bash", str(SCRIPT), *arguments]
    environment = {**os.environ, **VARIABLES}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split(" | ") for line in ended.stdout.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[1] for row in rows[1:]}


def test_every_check_that_needs_no_gpu_succeeds() -> None:
    assert table() == {
        "tensor parallelism, 2 ranks": "ok",
        "rank killed in a step, 2 ranks": "ok",
        "CUDA IPC between GPUs": "not tried",
        "NIXL between GPUs": "ok",
        "NIXL over RDMA between hosts": "not tried",
    }


@contextmanager
def peer(folder: Path) -> Iterator[str]:
    """The address of the second host's worker."""
    serving = Command(folder, ["bash", str(SCRIPT), "--serve", "127.0.0.1"], VARIABLES)
    try:
        yield serving.wait_for("listens on").split("listens on ")[1].split(";")[0]
    finally:
        serving.end()


def test_a_worker_of_another_host_answers_the_same(tmp_path: Path) -> None:
    with peer(tmp_path) as address:
        found = table("--here", "127.0.0.1", "--peer", address)
    assert found == {"NIXL between hosts, UCX_TLS=tcp": "ok"}

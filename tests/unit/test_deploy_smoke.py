"""deploy/smoke: the script that is run where several GPUs are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import multi_gpu

SCRIPT = Path(__file__).parents[2] / "deploy" / "smoke" / "multi_gpu.sh"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_its_help_names_every_argument() -> None:
    shown = run("--help").stdout
    assert {"--serve", "--peer", "--here"} <= set(re.findall(r"--\w+", shown))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--peer", "10.0.0.2:51002"], "--peer needs --here"),
        (["--peer"], "--peer needs a value"),
        (["--gpus", "2"], "unknown argument --gpus"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: list[str], reason: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert reason in ended.stderr


def test_it_runs_checks_that_exist() -> None:
    called = re.findall(r"\bcheck \"[^\"]+\" ([a-z-]+)", SCRIPT.read_text())
    assert set(called) == set(multi_gpu.CHECKS)


def test_failed_checks_are_rows_of_the_table_with_their_reason(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'NCCL | is broken' >&2\nexit 1\n")
    python.chmod(0o755)
    found = {"DEVICE": "cpu", "RANKS": "2 8", "PYTHON": str(python), "TMPDIR": str(tmp_path)}
    ended = run(**found)
    assert ended.returncode == 1
    rows = [line for line in ended.stdout.splitlines() if line.startswith("| ")]
    assert sum("| FAILED |" in row and row.endswith(r"| NCCL \| is broken |") for row in rows) == 3
    assert "| tensor parallelism, 8 ranks | not tried | | needs 8 GPUs, has 2 |" in rows
    (logs,) = tmp_path.glob("baton-smoke.*")
    assert str(logs) in ended.stdout


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("needs shellcheck (apt-get install shellcheck)")
    ended = subprocess.run([program, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout

"""Runs the programs in examples/ as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_python(name: str, *arguments: str) -> str:
    """Runs an example and returns what it prints."""
    return run([sys.executable, str(EXAMPLES / name), *arguments])


def run(command: list[str], folder: Path | None = None, seconds: float = 120) -> str:
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout

"""Attention fits a GPU's shared memory, which only its compiled kernels show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "support" / "attention_resources.py"

SHARED_BYTES = 232_448
"""Of a program on Hopper."""


def test_attention_of_wide_heads_fits_into_shared_memory(tmp_path: Path) -> None:
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **own, "PYTHONPATH": ":".join(sys.path)}
    script = [sys.executable, str(SCRIPT)]
    ran = subprocess.run(script, check=True, capture_output=True, env=environment)
    found = json.loads(ran.stdout)
    assert {name.split()[0] for name in found} >= {"_chunk", "_decode"}
    assert {name: size for name, size in found.items() if size > SHARED_BYTES} == {}

"""The committed stubs are what the compiler makes of proto/ today."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "baton" / "v1").glob("*.proto"))


def test_the_committed_stubs_match_the_protos(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"),
            *(
                f"--{kind}_out={tmp_path}"
                for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
            ),
            *map(str, PROTOS),
        ],
        check=True,
        capture_output=True,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "baton" / "v1").iterdir()}
    committed = {
        path.name: path.read_text()
        for path in (ROOT / "baton" / "v1").iterdir()
        if "_pb2" in path.name and path.is_file()
    }
    assert fresh == committed


def test_every_field_of_every_message_is_commented() -> None:
    bare = []
    for path in PROTOS:
        lines = path.read_text().splitlines()
        for before, line in itertools.pairwise(lines):
            is_field = line.strip().endswith(";") and " = " in line and "syntax" not in line
            if is_field and not before.strip().startswith("//"):
                bare.append(f"{path.name}: {line.strip()}")
    assert not bare

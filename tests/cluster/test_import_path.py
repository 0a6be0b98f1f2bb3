"""Where processes of a cluster import from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import ray
from baton.cluster import ray_session

ray_session.start("baton-import-path", 1)

@ray.remote
def imported():
    import sys
    try:
        import of_the_model
    except ImportError:
        return sys.path
    return "of_the_model has run"

print(ray.get(imported.remote()))
ray.shutdown()
"""


def test_nothing_is_imported_from_the_folder_that_a_command_runs_in(tmp_path: Path) -> None:
    (tmp_path / "of_the_model.py").touch()
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "program/program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "site-packages" in ran.stdout
    assert str(tmp_path) not in ran.stdout

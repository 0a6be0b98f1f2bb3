"""The wheel in environments of its own: what it installs, and what it leaves alone."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from baton import __version__

ROOT = Path(__file__).parents[2]
OTHER = "kernels"
"""A distribution on PyPI whose import name is that of one of our folders."""

# Without what would show a test's Python our sources, and with the system's index and proxies.
# Compiling takes most of an installation's time, and is done again by imports.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
ENVIRONMENT["PIP_NO_COMPILE"] = "1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("source") / "baton"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", target, copy], check=True)
    [built] = target.glob("*.whl")
    return built


class Environment:
    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.folder = folder
        self._python = folder / "bin" / "python"

    def pip(self, *arguments: str | Path) -> None:
        """By the pip of the tests: to install another takes seconds."""
        pip = [sys.executable, "-m", "pip", "--python", self._python]
        self._run(*pip, "--disable-pip-version-check", *arguments)

    def run(self, *arguments: str | Path) -> str:
        return self._run(self._python, *arguments)

    def _run(self, *command: str | Path) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def files(self) -> dict[str, str]:
        """Digests of all files but compiled ones, which imports make."""
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }


def is_ours(name: str) -> bool:
    """Whether a file of an environment may be one of this distribution's."""
    if name == "bin/baton":
        return True
    top = name.partition("/site-packages/")[2].partition("/")[0]
    return top in ("baton", f"baton_llm-{__version__}.dist-info")


def test_the_wheel_holds_one_import_root(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.partition("/")[0] for name in names}
    assert roots == {"baton", f"baton_llm-{__version__}.dist-info"}
    for needed in ("baton/py.typed", "baton/router/server.py", "baton/v1/inference_pb2.pyi"):
        assert needed in names


def test_installing_and_removing_changes_no_other_distribution(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "beside")
    environment.pip("install", "--no-deps", OTHER)
    before = environment.files()
    assert any(f"/site-packages/{OTHER}/" in name for name in before)
    for change in (
        ["install", "--no-deps", wheel],
        ["install", "--no-deps", "--force-reinstall", wheel],
    ):
        environment.pip(*change)
        after = environment.files()
        assert {name: after.get(name) for name in before} == before
        added = after.keys() - before.keys()
        assert added
        assert {name for name in added if not is_ours(name)} == set()
    environment.pip("uninstall", "--yes", "baton-llm")
    assert environment.files() == before


CALL = """
import sys
import baton

with baton.Client("127.0.0.1:1") as client:
    try:
        client.generate("hello", timeout=10)
    except baton.Unavailable as error:
        print(error)
heavy = {"torch", "ray", "nixl", "triton", "transformers", "yaml", "numpy", "typer"}
print(heavy & sys.modules.keys())
"""


def test_a_client_needs_grpc_and_protobuf_alone(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "client")
    environment.pip("install", wheel)
    said = environment.run("-c", CALL)
    assert said == ("no Baton router answers at 127.0.0.1:1; start one with `baton serve`\nset()\n")
    assert environment.run("-m", "baton", "--version") == f"baton {__version__}\n"
    refused = subprocess.run(
        [environment.folder / "bin" / "baton", "status"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert refused.returncode == 1
    assert "baton-llm[server]" in refused.stderr

"""Programs with other people's clients, each with its packages in an environment of its own: what
one needs must not change what another gets."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from processes import ProcessCluster

from baton.core.model_store import EMBEDDED_NAME, embedded_folder
from examples import run

PROGRAMS = sorted(Path(__file__).with_name("programs").iterdir())
INSTALL_SECONDS = RUN_SECONDS = 600
PARIS = "The capital of France is Paris."


@pytest.fixture
def folder() -> Iterator[Path]:
    """Deleted at once: some environments have a gigabyte."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.timeout(INSTALL_SECONDS + RUN_SECONDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_client_gets_the_same_answer_every_way(
    program: Path, cluster: ProcessCluster, folder: Path
) -> None:
    if program.suffix == ".mjs" and not shutil.which("npm"):
        pytest.skip("needs Node.js 18 or later with npm (apt-get install npm)")
    served = [f"http://{cluster.http}", EMBEDDED_NAME, cluster.address, str(embedded_folder())]
    answers = run([*installed(program, folder), *served], folder, RUN_SECONDS).splitlines()
    assert len(answers) > 1
    assert answers == [PARIS] * len(answers)


def installed(program: Path, folder: Path) -> list[str]:
    """The command that runs `program`, whose first lines name its packages, and those that it
    borrows from this environment because they are large."""
    headings = dict(re.findall(r"^(?:#|//) (pip|npm|borrow): (.*)", program.read_text(), re.M))
    copy = shutil.copy(program, folder)
    if "npm" in headings:
        packages = headings["npm"].split()
        run(["npm", "install", "--no-audit", "--no-fund", *packages], folder, INSTALL_SECONDS)
        return ["node", copy]
    venv.create(folder / "venv", with_pip=True)
    borrowed = [borrow(name, folder / "venv") for name in headings.get("borrow", "").split()]
    python = str(folder / "venv" / "bin" / Path(sys.executable).name)
    packages = [*headings["pip"].split(), *borrowed]
    run([python, "-m", "pip", "install", "--quiet", *packages], folder, INSTALL_SECONDS)
    return [python, copy]


def borrow(name: str, environment: Path) -> str:
    """Links a package into an environment. Returns the version that pip must leave there."""
    found = distribution(name)
    (target,) = environment.glob("lib/python*/site-packages")
    for top in {path.parts[0] for path in found.files or () if path.parts[0] != ".."}:
        (target / top).symlink_to(str(found.locate_file(top)))
    return f"{name}=={found.version}"

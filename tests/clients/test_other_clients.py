"""Programs with other people's clients, each with its packages in an environment of its own: what
one needs must not change what another gets."""

from __future__ import annotations

import re
import shutil
import sys
import venv
from pathlib import Path

import pytest
from processes import ProcessCluster

from baton.core.model_store import EMBEDDED_NAME
from examples import run

PROGRAMS = sorted(Path(__file__).with_name("programs").iterdir())
INSTALL_SECONDS = 600
PARIS = "The capital of France is Paris."


@pytest.mark.timeout(900)  # packages are downloaded
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_client_gets_the_same_answer_every_way(
    program: Path, cluster: ProcessCluster, tmp_path: Path
) -> None:
    if program.suffix == ".mjs" and not shutil.which("npm"):
        pytest.skip("needs Node.js 18 or later with npm (apt-get install npm)")
    command = installed(program, tmp_path)
    printed = run([*command, f"http://{cluster.http}", EMBEDDED_NAME, cluster.address], tmp_path)
    answers = printed.splitlines()
    assert len(answers) > 1
    assert answers == [PARIS] * len(answers)


def installed(program: Path, folder: Path) -> list[str]:
    """The command that runs `program`, whose first line names its packages."""
    heading = re.fullmatch(r"(?:#|//) (pip|npm): (.*)", program.read_text().splitlines()[0])
    assert heading, f"{program.name} does not say what to install"
    packages = heading[2].split()
    copy = shutil.copy(program, folder)
    if heading[1] == "npm":
        run(["npm", "install", "--no-audit", "--no-fund", *packages], folder, INSTALL_SECONDS)
        return ["node", copy]
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / Path(sys.executable).name)
    run([python, "-m", "pip", "install", "--quiet", *packages], folder, INSTALL_SECONDS)
    return [python, copy]

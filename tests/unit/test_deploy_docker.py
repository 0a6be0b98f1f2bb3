"""deploy/docker: what the images are made of exists, and they run as nobody in particular."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from baton.core.config import RouterConfig
from baton.router.edges.http.http_app import OPEN_PATHS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def instructions(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """The lines of a Dockerfile: a word, and the rest."""
    lines = [line for line in request.param.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.split("\n"))]


def of(instructions: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for found, rest in instructions if found == word]


def sources(instructions: list[tuple[str, str]]) -> set[str]:
    """What is copied from the repository."""
    copies = [shlex.split(rest) for rest in of(instructions, "COPY")]
    return {name for *names, _ in copies if not names[0].startswith("--") for name in names}


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.stem for path in FILES] == ["cpu", "cuda"]


def test_a_build_is_sent_what_it_copies_and_nothing_else(
    instructions: list[tuple[str, str]],
) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rest = [line for line in lines if not line.startswith("#")]
    assert first == "*"
    assert {line[1:] for line in rest if line.startswith("!")} == sources(instructions)
    assert all((ROOT / name).exists() for name in sources(instructions))


def test_every_package_of_the_project_is_copied(instructions: list[tuple[str, str]]) -> None:
    links = {path.name for path in (ROOT / "baton").iterdir() if path.is_symlink()}
    packages = {"baton"} | links
    assert packages | {"pyproject.toml", "README.md", "LICENSE"} == sources(instructions)


def test_it_has_two_stages_on_bases_of_a_fixed_version(
    instructions: list[tuple[str, str]],
) -> None:
    built, final = of(instructions, "FROM")
    assert built == f"{final} AS build"
    assert re.search(r":\d+\.\d+\.\d+-", final)
    (copied,) = [rest for rest in of(instructions, "COPY") if rest.startswith("--from=")]
    assert copied.startswith("--from=build ")


def test_it_runs_as_the_user_of_the_manifests(instructions: list[tuple[str, str]]) -> None:
    router = (ROOT / "deploy" / "kubernetes" / "base" / "router.yaml").read_text()
    (user,) = re.findall(r"runAsUser: (\d+)", router)
    assert of(instructions, "USER") == [f"{user}:{user}"]


def test_it_starts_a_command_of_the_project_under_an_init(
    instructions: list[tuple[str, str]],
) -> None:
    (entry,), (command,) = of(instructions, "ENTRYPOINT"), of(instructions, "CMD")
    assert json.loads(entry)[0] == "tini"
    assert json.loads(command)[0] in PROJECT["project"]["scripts"]


def test_its_health_check_asks_what_a_router_answers(instructions: list[tuple[str, str]]) -> None:
    (check,) = of(instructions, "HEALTHCHECK")
    found = re.findall(r"https?://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert set(found) == {(str(RouterConfig().http_port), "/health")}
    assert "/health" in OPEN_PATHS


def test_it_exposes_the_ports_of_a_router(instructions: list[tuple[str, str]]) -> None:
    (exposed,) = of(instructions, "EXPOSE")
    router = RouterConfig()
    assert exposed.split() == [
        str(port) for port in (router.port, router.http_port, router.metrics_port)
    ]

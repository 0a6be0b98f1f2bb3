"""deploy/docker: what the images are made of exists, and they run as nobody in particular."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import baton
from baton.core.config import RouterConfig
from baton.router.edges.http.http_app import OPEN_PATHS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))


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


def packages_of(instructions: list[tuple[str, str]]) -> set[str]:
    return {name for name in sources(instructions) if not name.startswith("deploy/")}


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.stem for path in FILES] == ["cpu", "cuda"]


def test_a_build_is_sent_what_it_copies_and_nothing_else(
    instructions: list[tuple[str, str]],
) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rest = [line for line in lines if not line.startswith("#")]
    assert first == "*"
    sent = {line[1:] for line in rest if line.startswith("!")}
    pins = {name for name in sent if name.startswith("deploy/")}
    assert pins == {"deploy/docker/*.lock", "deploy/docker/cpu-torch.txt"}
    assert sent - pins == packages_of(instructions)
    assert all((ROOT / name).exists() for name in sources(instructions))


def test_every_package_of_the_project_is_copied(instructions: list[tuple[str, str]]) -> None:
    links = {path.name for path in (ROOT / "baton").iterdir() if path.is_symlink()}
    packages = {"baton"} | links
    assert packages | {"pyproject.toml", "README.md", "LICENSE"} == packages_of(instructions)


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


def test_it_installs_pinned_packages_by_their_digests_and_then_the_project_alone(
    instructions: list[tuple[str, str]],
) -> None:
    installs = [rest for rest in of(instructions, "RUN") if "pip install" in rest]
    first, *_, last = installs
    (lock,) = re.findall(r"--requirement (\S+\.lock)", first)
    assert lock in sources(instructions)
    assert "--require-hashes --no-deps" in first
    assert "--no-deps --no-build-isolation ." in last


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([a-z0-9_.-]+)==([^ \n]+)", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_lock_has_every_package_of_a_server_in_a_version_that_fits(name: str) -> None:
    pinned = pins(DOCKER / f"{name}.lock") | pins(DOCKER / "cpu-torch.txt")
    project = PROJECT["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["server"]):
        wanted = Requirement(text)
        assert pinned[canonicalize_name(wanted.name)] in wanted.specifier, text
    # What the project is built with, without a download.
    assert "setuptools" in pinned


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_pin_has_a_digest_and_no_host(name: str) -> None:
    text = (DOCKER / f"{name}.lock").read_text()
    assert "://" not in text
    assert "--index" not in text
    for line in text.split("\n"):
        if re.match(r"[a-z]", line):
            assert line.endswith("\\"), line


def test_both_images_have_the_same_torch_and_only_one_has_cuda() -> None:
    cpu, cuda = pins(DOCKER / "cpu.lock"), pins(DOCKER / "cuda.lock")
    assert pins(DOCKER / "cpu-torch.txt")["torch"] == cuda["torch"]
    assert "torch" not in cpu
    assert {name for name in cuda if name.startswith("nvidia-")}
    assert not {name for name in cpu if name.startswith("nvidia-")}
    assert {name: cuda[name] for name in cpu} == cpu


def test_both_images_are_built_for_both_architectures() -> None:
    bake = json.loads((DOCKER / "docker-bake.json").read_text())
    targets = bake["target"]
    assert bake["variable"]["VERSION"]["default"] == baton.__version__
    assert targets["common"]["platforms"] == ["linux/amd64", "linux/arm64"]
    assert bake["group"]["default"]["targets"] == [path.stem for path in FILES]
    for path in FILES:
        target = targets[path.stem]
        assert target["inherits"] == ["common"]
        assert ROOT / target["dockerfile"] == path
        declared = set(re.findall(r"^ARG (\w+)", path.read_text(), re.MULTILINE))
        assert set(target.get("args", ())) == declared


def found(*vulnerabilities: dict[str, object]) -> str:
    audited = {"name": "torch", "version": "1.0", "vulns": vulnerabilities}
    skipped = {"name": "ray", "skip_reason": "not found"}
    return json.dumps({"dependencies": [audited, skipped]})


def test_an_audit_tells_vulnerable_from_waived_and_from_not_looked_up() -> None:
    one = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"]}
    two = {"id": "PYSEC-2", "aliases": [], "fix_versions": []}
    audit = runpy.run_path(str(DOCKER / "audit.py"))["parse"]
    clean = audit(found(), {})
    assert (clean.looked_up, clean.not_looked_up, clean.vulnerable) == (1, ["ray"], [])
    seen = audit(found(one, two), {"CVE-1": "it is not called"})
    assert seen.waived == ["torch 1.0: PYSEC-1, waived: it is not called"]
    assert seen.vulnerable == ["torch 1.0: PYSEC-2, fixed by nothing yet"]


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

"""deploy/helm, rendered by Helm's own code: it gives what the kustomize overlays give."""

from __future__ import annotations

import json
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomize import OVERLAYS, Manifest, containers, find, pods, render

from examples import run

CHART = OVERLAYS.parents[1] / "helm"
INSTALL_SECONDS = 300
# Helm's Go packages as a library, since no package index has the command.
PACKAGE = "helm-python-sdk==0.2.2"
PROGRAM = """
import json, sys
import helm_python as helm

values = json.loads(sys.argv[2])
errors = helm.lint(sys.argv[1], values)["errors"]
try:
    with helm.Chart.load(sys.argv[1]) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name="baton", namespace=sys.argv[3])
except helm.HelmError as error:
    errors, texts = [*errors, str(error)], {}
print(json.dumps([errors, "\\n---\\n".join(texts.values())]))
"""
Template = Callable[..., list[Manifest]]


class RefusedByHelm(Exception):
    pass


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """`helm lint` and `helm template`."""
    folder = tmp_path_factory.mktemp("helm")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / Path(sys.executable).name)
    run([python, "-m", "pip", "install", "--quiet", PACKAGE], folder, INSTALL_SECONDS)

    def rendered(values: dict[str, Any], namespace: str = "default") -> list[Manifest]:
        command = [python, "-c", PROGRAM, str(CHART), json.dumps(values), namespace]
        errors, text = json.loads(run(command, folder).splitlines()[-1])
        if errors:
            raise RefusedByHelm(*errors)
        return [manifest for manifest in yaml.safe_load_all(text) if manifest]

    return rendered


@pytest.mark.parametrize("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_a_chart_gives_what_its_overlay_gives(template: Template, overlay: str) -> None:
    assert template({"overlay": overlay}) == render(OVERLAYS / overlay)


def test_values_add_components_and_patches(template: Template, tmp_path: Path) -> None:
    patch = {"op": "replace", "path": "/spec/maxReplicas", "value": 3}
    target = {"kind": "HorizontalPodAutoscaler", "name": "baton-router"}
    values = {
        "components": ["planner", "redis"],
        "images": {"redis": "registry.example/redis:7.2.5"},
        "patches": [{"target": target, "patch": [patch]}],
    }
    wanted = {
        "namespace": "baton",
        "resources": ["overlays/cpu-demo"],
        "components": ["components/planner", "components/redis"],
        "images": [{"name": "redis", "newName": "registry.example/redis", "newTag": "7.2.5"}],
        "patches": [{"target": target, "patch": json.dumps([patch])}],
    }
    for name in ("overlays", "components", "base"):
        (tmp_path / name).symlink_to(OVERLAYS.parent / name)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(wanted))

    def by_name(manifest: Manifest) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    assert sorted(template(values), key=by_name) == sorted(render(tmp_path), key=by_name)


def test_values_replace_images_and_the_configuration(template: Template) -> None:
    manifests = template({"images": {"baton": "mine/baton:2"}, "config": "model: embedded\n"})
    assert {each["image"] for pod in pods(manifests) for each in containers(pod)} == {
        "mine/baton:2"
    }
    config = find(manifests, "ConfigMap", "baton-config")
    assert config["data"] == {"baton.yaml": "model: embedded\n"}


def test_a_release_does_not_own_the_namespace_that_it_is_in(template: Template) -> None:
    kinds = [manifest["kind"] for manifest in template({}, namespace="baton")]
    assert "Namespace" not in kinds
    assert len(kinds) == len(render(OVERLAYS / "cpu-demo")) - 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"overlay": "cpu"}, "overlay"),
        ({"component": ["redis"]}, "component"),
        ({"patches": [{"target": {"kind": "Pod", "name": "x"}, "patch": []}]}, "nothing to patch"),
    ],
)
def test_a_wrong_value_is_refused(template: Template, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedByHelm, match=message):
        template(values)

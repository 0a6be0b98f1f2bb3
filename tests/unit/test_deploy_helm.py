"""deploy/helm: its values name what exists. tests/clients/test_helm.py renders it."""

from __future__ import annotations

import json

import yaml
from kustomize import OVERLAYS

import baton

CHART = OVERLAYS.parents[1] / "helm"


def names(folder: str) -> set[str]:
    return {path.name for path in (OVERLAYS.parent / folder).iterdir()}


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == baton.__version__


def test_values_may_name_every_overlay_and_component() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(schema["overlay"]["enum"]) == names("overlays")
    assert set(schema["components"]["items"]["enum"]) == names("components")
    assert yaml.safe_load((CHART / "values.yaml").read_text()).keys() == schema.keys() - {"global"}


def test_the_chart_has_the_files_of_the_overlays() -> None:
    assert (CHART / "kubernetes").resolve() == OVERLAYS.parent.resolve()

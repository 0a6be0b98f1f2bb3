"""Renders deploy/kubernetes as `kubectl kustomize` does.

Supported: resources, components, JSON patches (RFC 6902), configMapGenerator with files, images,
namespace. Anything else raises, so that nothing is left out silently.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

KNOWN = {
    *("apiVersion", "kind", "namespace", "resources", "components", "patches"),
    *("configMapGenerator", "images"),
}
WITHOUT_NAMESPACE = {"Namespace"}
OVERLAYS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "overlays"


def render(folder: Path) -> list[Manifest]:
    """The manifests of the kustomization in `folder`, for the caller to change."""
    return copy.deepcopy(_rendered(folder))


@functools.cache
def _rendered(folder: Path) -> list[Manifest]:
    return _build(folder, [])


def _build(folder: Path, below: list[Manifest]) -> list[Manifest]:
    """Renders a kustomization on top of `below`, which a component changes."""
    tree = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert tree.keys() <= KNOWN, f"{folder}: {tree.keys() - KNOWN} is not known here"
    manifests = [*below]
    for name in tree.get("resources", ()):
        manifests += _resource(folder / name)
    manifests += [_config_map(folder, item) for item in tree.get("configMapGenerator", ())]
    for name in tree.get("components", ()):
        manifests = _build(folder / name, manifests)
    for patch in tree.get("patches", ()):
        _patch(manifests, patch, folder)
    for image in tree.get("images", ()):
        _replace_image(manifests, image["name"], f"{image['newName']}:{image['newTag']}")
    for manifest in manifests if "namespace" in tree else ():
        if manifest["kind"] not in WITHOUT_NAMESPACE:
            manifest["metadata"]["namespace"] = tree["namespace"]
    return manifests


def _resource(path: Path) -> list[Manifest]:
    if path.is_dir():
        return render(path)
    return [item for item in yaml.safe_load_all(path.read_text()) if item]


def _config_map(folder: Path, item: dict[str, Any]) -> Manifest:
    assert item.keys() == {"name", "files", "options"}
    assert item["options"] == {"disableNameSuffixHash": True}
    data = {name: (folder / name).read_text() for name in item["files"]}
    metadata = {"name": item["name"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patch(manifests: list[Manifest], patch: dict[str, Any], folder: Path) -> None:
    text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
    target = patch["target"]
    found = [
        manifest
        for manifest in manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == (target["kind"], target["name"])
    ]
    assert found, f"{folder}: nothing to patch is {target}"
    for manifest in found:
        for operation in yaml.safe_load(text):
            _apply(manifest, operation)


def _apply(manifest: Manifest, operation: dict[str, Any]) -> None:
    *parents, last = [
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
    ]
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    value = copy.deepcopy(operation.get("value"))
    match operation["op"], place:
        case "add", list():
            place.insert(len(place) if last == "-" else int(last), value)
        case "add", dict():
            place[last] = value
        case "replace", list():
            place[int(last)] = value
        case "replace", dict():
            assert last in place, f"{operation['path']} is not there to be replaced"
            place[last] = value
        case "remove", list():
            del place[int(last)]
        case "remove", dict():
            del place[last]
        case unknown, _:
            raise AssertionError(f"{unknown} at {operation['path']} is not known here")


def _replace_image(manifests: list[Manifest], name: str, new: str) -> None:
    for pod in pods(manifests):
        for container in containers(pod):
            if container["image"] == name:
                container["image"] = new


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Every pod template: its metadata and spec."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest["spec"]["template"]
        elif manifest["kind"] == "RayCluster":
            yield manifest["spec"]["headGroupSpec"]["template"]
            for group in manifest["spec"]["workerGroupSpecs"]:
                yield group["template"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def named(items: list[Manifest], name: str) -> Manifest:
    """The item with that name."""
    (found,) = [item for item in items if item["name"] == name]
    return found


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [
        item for item in manifests if (item["kind"], item["metadata"]["name"]) == (kind, name)
    ]
    return found


def is_redis(pod: Manifest) -> bool:
    return bool(pod["metadata"]["labels"]["app.kubernetes.io/component"] == "redis")

"""What the containers of every overlay may do, and what they can count on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kustomize import Manifest, containers, is_redis, named, pods

# What docs/OPERATIONS.md has the user make, and the token that the KubeRay operator makes.
BROUGHT = {"baton-keys", "baton-authority", "baton-models", "baton-redis", "baton"}


def test_every_container_is_locked_down(overlay: list[Manifest]) -> None:
    for pod in pods(overlay):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"]["drop"] == ["ALL"]
            assert set(context["capabilities"].get("add", ())) <= {"IPC_LOCK"}
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]


def test_only_volumes_of_its_own_can_be_written(overlay: list[Manifest]) -> None:
    claimed = {
        claim["metadata"]["name"]
        for manifest in overlay
        for claim in manifest.get("spec", {}).get("volumeClaimTemplates", ())
    }
    for pod in pods(overlay):
        own = claimed | {item["name"] for item in pod["spec"]["volumes"] if "emptyDir" in item}
        for container in containers(pod):
            for mount in container["volumeMounts"]:
                assert mount.get("readOnly") or mount["name"] in own, mount


def test_every_container_has_a_home_and_a_place_for_files_that_it_can_write(
    overlay: list[Manifest],
) -> None:
    for pod in (pod for pod in pods(overlay) if not is_redis(pod)):
        own = {item["name"] for item in pod["spec"]["volumes"] if "emptyDir" in item}
        for container in containers(pod):
            mounts = container["volumeMounts"]
            writable = {Path(mount["mountPath"]) for mount in mounts if mount["name"] in own}
            home = Path(named(container["env"], "HOME")["value"])
            assert writable & {home, *home.parents}, container["name"]
            assert Path("/tmp") in writable, container["name"]


def test_what_it_refers_to_is_there_or_is_the_users_to_bring(overlay: list[Manifest]) -> None:
    here = {manifest["metadata"]["name"] for manifest in overlay}
    assert set(references(overlay)) <= here | BROUGHT
    assert not [manifest for manifest in overlay if manifest["kind"] == "Secret"]


def references(tree: Any) -> list[str]:
    """Names of ConfigMaps, Secrets and claims."""
    if isinstance(tree, list):
        return [name for item in tree for name in references(item)]
    if not isinstance(tree, dict):
        return []
    found = [tree[key] for key in ("secretName", "claimName") if key in tree]
    found += [tree[key]["name"] for key in ("configMap", "secretKeyRef") if key in tree]
    return found + [name for item in tree.values() for name in references(item)]

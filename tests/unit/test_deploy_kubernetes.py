"""deploy/kubernetes: what each overlay renders is valid, locked down, and fits the code."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray_cluster
import typer
from kubernetes_validate import ValidationError
from kustomize import OVERLAYS, Manifest, containers, find, is_redis, named, pods, render
from packaging.specifiers import SpecifierSet

from baton.cli.app import app
from baton.core import config as configs
from baton.core import tls
from baton.core.config import Config
from baton.router.edges.http.http_app import OPEN_PATHS
from baton.router.server import GRACE_SECONDS

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.34"
# Kinds that the KubeRay and Prometheus operators bring.
CUSTOM = {"RayCluster", "ServiceMonitor", "PodMonitor", "ScrapeConfig"}
# Beyond drain_seconds, `Cluster.stop` waits so long for the router, and then for the workers.
STOP_SECONDS = 15.0


def config_of(manifests: list[Manifest], folder: Path) -> Config:
    path = folder / "baton.yaml"
    path.write_text(find(manifests, "ConfigMap", "baton-config")["data"]["baton.yaml"])
    return configs.load(path)


def router_of(manifests: list[Manifest]) -> Manifest:
    pod = find(manifests, "Deployment", "baton-router")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return container


def head_of(manifests: list[Manifest]) -> Manifest:
    return find(manifests, "RayCluster", "baton")["spec"]["headGroupSpec"]["template"]["spec"]


def ports(container: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_core_kinds_are_valid(overlay: list[Manifest]) -> None:
    for manifest in overlay:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_ray_cluster_is_valid(overlay: list[Manifest]) -> None:
    ray_cluster.validate(find(overlay, "RayCluster", "baton"), KUBERNETES)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("spec", "headGroupSpecs"),
        ("spec.authOptions", "modes"),
        ("spec.autoscalerOptions", "idleTimeout"),
        ("spec.autoscalerOptions.securityContext", "privilege"),
        ("spec.workerGroupSpecs.0", "minReplica"),
        ("spec.workerGroupSpecs.0.template.spec", "volume"),
        ("spec.headGroupSpec.template.spec.containers.0", "imagee"),
    ],
)
def test_unknown_fields_of_a_ray_cluster_are_refused(path: str, field: str) -> None:
    cluster = find(render(OVERLAYS / "cpu-demo"), "RayCluster", "baton")
    place: Any = cluster
    for part in path.split("."):
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[field] = "baton"
    with pytest.raises((jsonschema.ValidationError, ValidationError), match=field):
        ray_cluster.validate(cluster, KUBERNETES)


@pytest.mark.parametrize("field", ["headGroupSpec", "workerGroupSpecs.0.maxReplicas"])
def test_missing_fields_of_a_ray_cluster_are_refused(field: str) -> None:
    cluster = find(render(OVERLAYS / "cpu-demo"), "RayCluster", "baton")
    *parents, last = field.split(".")
    place: Any = cluster["spec"]
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    del place[last]
    with pytest.raises(jsonschema.ValidationError, match=last):
        ray_cluster.validate(cluster, KUBERNETES)


def test_its_configuration_is_one_that_a_router_would_start_with(
    overlay: list[Manifest], tmp_path: Path
) -> None:
    tls.check_router(config_of(overlay, tmp_path))


def test_a_router_listens_where_its_pod_and_its_service_say(
    overlay: list[Manifest], tmp_path: Path
) -> None:
    router = config_of(overlay, tmp_path).router
    open_ports = ports(router_of(overlay))
    assert open_ports == {
        "grpc": router.port,
        "http": router.http_port,
        "metrics": router.metrics_port,
    }
    service = find(overlay, "Service", "baton-router")["spec"]
    assert {item["targetPort"]: item["port"] for item in service["ports"]} == open_ports


def test_a_router_follows_the_controller_where_it_listens(
    overlay: list[Manifest], tmp_path: Path
) -> None:
    port = config_of(overlay, tmp_path).controller.port
    assert ports(named(head_of(overlay)["containers"], "ray-head"))["controller"] == port
    cluster = find(overlay, "RayCluster", "baton")["metadata"]["name"]
    assert f"--controller={cluster}-head-svc:{port}" in router_of(overlay)["args"]


def test_its_probes_ask_what_a_router_answers(overlay: list[Manifest], tmp_path: Path) -> None:
    config, router = config_of(overlay, tmp_path), router_of(overlay)
    scheme = "HTTPS" if config.tls.folder else "HTTP"
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = router[kind]
        if "grpc" in probe:
            # The kubelet speaks no TLS over gRPC.
            assert (probe["grpc"], scheme) == ({"port": config.router.port}, "HTTP")
            continue
        assert probe["httpGet"]["path"] in OPEN_PATHS
        assert probe["httpGet"]["port"] == "http"
        assert probe["httpGet"].get("scheme", "HTTP") == scheme
    assert router["livenessProbe"]["httpGet"]["path"] == "/health"
    assert router["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_pods_are_given_the_time_that_draining_takes(
    overlay: list[Manifest], tmp_path: Path
) -> None:
    drain = config_of(overlay, tmp_path).drain_seconds
    pod = find(overlay, "Deployment", "baton-router")["spec"]["template"]["spec"]
    pause = float(router_of(overlay)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + GRACE_SECONDS
    whole = 2 * (drain + STOP_SECONDS)
    assert head_of(overlay)["terminationGracePeriodSeconds"] >= whole
    for group in find(overlay, "RayCluster", "baton")["spec"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (*_, wait) = leave_of(spec["containers"][0])
        seconds = float(wait.removeprefix("--wait="))
        assert seconds >= drain + STOP_SECONDS
        assert spec["terminationGracePeriodSeconds"] > seconds


def leave_of(container: Manifest) -> list[str]:
    """What a worker's pod runs before it goes."""
    command: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    return command


def test_a_worker_pod_leaves_by_a_command_that_exists(overlay: list[Manifest]) -> None:
    for group in find(overlay, "RayCluster", "baton")["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        baton, command, *flags = leave_of(container)
        assert (baton, command) == ("baton", "leave")
        assert {flag.partition("=")[0] for flag in flags} <= options(command)


def test_budgets_for_disruption_select_pods_that_exist(overlay: list[Manifest]) -> None:
    for budget in (item for item in overlay if item["kind"] == "PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"]
        assert any(wanted.items() <= labels.items() for labels in labels_of(overlay)), budget


def test_its_commands_and_flags_exist(overlay: list[Manifest]) -> None:
    python, dash_m, module, *flags = router_of(overlay)["args"]
    assert (python, dash_m) == ("python", "-m")
    main = importlib.util.find_spec(f"{module}.__main__")
    assert main is not None
    assert main.origin is not None
    known = set(re.findall(r'"(--[a-z-]+)"', Path(main.origin).read_text()))
    assert {flag.partition("=")[0] for flag in flags} <= known
    baton, command, *flags = named(head_of(overlay)["containers"], "baton")["args"]
    assert baton == "baton"
    assert {flag.partition("=")[0] for flag in flags} <= options(command)


def test_ray_and_baton_serve_see_each_other(overlay: list[Manifest]) -> None:
    head = head_of(overlay)
    assert head["shareProcessNamespace"]
    for name in ("ray-head", "baton"):
        mounts = named(head["containers"], name)["volumeMounts"]
        assert {"name": "ray-logs", "mountPath": "/tmp/ray"} in mounts


def options(command: str) -> set[str]:
    group = typer.main.get_command(app)
    return {name for item in group.commands[command].params for name in item.opts}  # type: ignore[attr-defined]


def test_certificates_are_made_by_a_command_that_exists(overlay: list[Manifest]) -> None:
    for pod in pods(overlay):
        for container in pod["spec"].get("initContainers", ()):
            (script,) = container["args"]
            (command,) = re.findall(r"baton (\w+) (?:[^\n]|\\\n)+", script)
            assert set(re.findall(r" (--[a-z-]+)", script)) <= options(command)


def test_certificates_can_be_made_again_in_the_same_pod(overlay: list[Manifest]) -> None:
    """Files of a Secret are read-only, and so are their copies."""
    for pod in pods(overlay):
        for container in pod["spec"].get("initContainers", ()):
            (script,) = container["args"]
            (copied,) = re.findall(r"^cp (.+)", script, re.MULTILINE)
            assert copied.startswith("-f ")


def test_files_that_the_configuration_names_are_mounted(
    overlay: list[Manifest], tmp_path: Path
) -> None:
    config = config_of(overlay, tmp_path)
    ray_head = named(head_of(overlay)["containers"], "ray-head")
    workers = [pod["spec"]["containers"][0] for pod in pods(overlay) if not is_redis(pod)]
    assert router_of(overlay) in workers
    for container in (ray_head, router_of(overlay)):
        assert is_mounted(config.router.keys, container)
    for container in workers:
        assert is_mounted(config.tls.folder, container)
        assert config.model == "embedded" or is_mounted(config.model, container)


def is_mounted(path: str, container: Manifest) -> bool:
    mounts = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    return not path or bool(mounts & {Path(path), *Path(path).parents})


def test_policies_select_pods_that_exist_and_deny_the_rest(overlay: list[Manifest]) -> None:
    policies = [item for item in overlay if item["kind"] == "NetworkPolicy"]
    denied = find(overlay, "NetworkPolicy", "default-deny")["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in policies:
        selector = policy["spec"]["podSelector"]
        assert any(selects(selector, labels) for labels in labels_of(overlay)), policy


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    among = selector.get("matchExpressions", ())
    assert all(item["operator"] == "In" for item in among)
    return wanted.items() <= labels.items() and all(
        labels.get(item["key"]) in item["values"] for item in among
    )


def labels_of(manifests: list[Manifest]) -> list[dict[str, str]]:
    """Of every pod, with those that KubeRay adds."""
    spec = find(manifests, "RayCluster", "baton")["spec"]
    ray = {"ray.io/cluster": "baton"}
    head = {**spec["headGroupSpec"]["template"]["metadata"]["labels"], **ray}
    found = [{**head, "ray.io/node-type": "head"}]
    for kind in ("Deployment", "StatefulSet"):
        owners = [item for item in manifests if item["kind"] == kind]
        found += [item["spec"]["template"]["metadata"]["labels"] for item in owners]
    for group in spec["workerGroupSpecs"]:
        labels = group["template"]["metadata"]["labels"]
        of_group = {"ray.io/group": group["groupName"], "ray.io/node-type": "worker"}
        found.append({**labels, **ray, **of_group})
    return found


def test_pods_spread_among_their_own_kind(overlay: list[Manifest]) -> None:
    spread = [
        constraint["labelSelector"]["matchLabels"]
        for pod in pods(overlay)
        for constraint in pod["spec"].get("topologySpreadConstraints", ())
    ]
    for wanted in spread:
        assert any(wanted.items() <= labels.items() for labels in labels_of(overlay)), wanted


def test_images_have_a_registry_and_a_version(overlay: list[Manifest]) -> None:
    images = {container["image"] for pod in pods(overlay) for container in containers(pod)}
    (image,) = [name for name in images if "/redis:" not in name]
    assert re.fullmatch(r"[\w.]+/baton:\d+\.\d+\.\d+-(cpu|cuda)", image)
    for other in images - {image}:
        assert re.fullmatch(r"[\w.]+/redis:\d+\.\d+\.\d+", other)


def test_the_groups_have_as_many_gpus_as_the_workers_want(
    overlay: list[Manifest], tmp_path: Path
) -> None:
    config = config_of(overlay, tmp_path)
    wanted = sum(pool.workers * (pool.gpus or 0) for pool in (config.prefill, config.decode))
    there = 0
    for group in find(overlay, "RayCluster", "baton")["spec"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        there += group["maxReplicas"] * int(limits.get("nvidia.com/gpu", 0))
    assert wanted <= there
    assert (config.device == "cuda") == (there > 0)


def test_workers_ask_for_what_the_head_does_not_have(
    overlay: list[Manifest], tmp_path: Path
) -> None:
    """Else they come to be there, when they are started before the other pods are."""
    config = config_of(overlay, tmp_path)
    spec = find(overlay, "RayCluster", "baton")["spec"]
    head = resources_of(spec["headGroupSpec"])
    groups = [resources_of(group) for group in spec["workerGroupSpecs"]]
    for pool in (config.prefill, config.decode):
        wanted = {"GPU": pool.gpus or 0.0, **dict(pool.resources)}
        assert not fits(wanted, head)
        assert any(fits(wanted, offered) for offered in groups)


def fits(wanted: dict[str, float], offered: dict[str, float]) -> bool:
    return all(amount <= offered.get(name, 0.0) for name, amount in wanted.items())


def resources_of(group: Manifest) -> dict[str, float]:
    """What a pod of a group has of Ray's resources."""
    # KubeRay puts it into a command line, and so it is quoted.
    quoted = group["rayStartParams"].get("resources", '"{}"')
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return {"GPU": float(limits.get("nvidia.com/gpu", 0)), **json.loads(json.loads(quoted))}


def test_a_ray_cluster_runs_the_ray_that_its_images_have(overlay: list[Manifest]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (bounds,) = re.findall(r'"ray\[default\](.*)"', project)
    assert find(overlay, "RayCluster", "baton")["spec"]["rayVersion"] in SpecifierSet(bounds)


def test_a_head_with_a_redis_finds_it_and_what_it_started_before(overlay: list[Manifest]) -> None:
    cluster = find(overlay, "RayCluster", "baton")["spec"]
    serve = named(head_of(overlay)["containers"], "baton")["args"]
    known = [item for item in overlay if item["metadata"]["name"] == "baton-redis"]
    if not known:
        assert "gcsFaultToleranceOptions" not in cluster
        assert "--detach" not in serve
        return
    service = find(overlay, "Service", "baton-redis")
    (port,) = service["spec"]["ports"]
    name = service["metadata"]["name"]
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == f"{name}:{port['port']}"
    (container,) = find(overlay, "StatefulSet", name)["spec"]["template"]["spec"]["containers"]
    assert ports(container)[port["targetPort"]] == port["port"]
    assert {"--detach", "--watch"} <= set(serve)
    assert any(flag.startswith("--name=") for flag in serve)


def test_pods_follow_what_the_planner_wants(tmp_path: Path) -> None:
    """A worker without a node is what Ray's autoscaler adds a pod for."""
    lines = f"""
resources: [{OVERLAYS / "gpu-rdma"}]
components: [{OVERLAYS.parent / "components" / "planner"}]
"""
    (tmp_path / "kustomization.yaml").write_text(lines)
    planned = render(tmp_path)
    serve = named(head_of(planned)["containers"], "baton")["args"]
    assert "--plan" in serve
    assert "--plan" in options("serve")
    cluster = find(planned, "RayCluster", "baton")
    assert cluster["spec"]["enableInTreeAutoscaling"]
    ray_cluster.validate(cluster, KUBERNETES)

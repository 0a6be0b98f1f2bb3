"""Validates a RayCluster: KubeRay's fields by the schema below, its pods by Kubernetes' own.

The schema has the fields of KubeRay 1.7's `ray.io/v1` that deploy/ uses, and refuses all others.
Add a field here, as KubeRay's definition has it, when a manifest begins to use it.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate
from kustomize import Manifest, pods


def _fields(*required: str, **properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _one_of(*values: str) -> dict[str, object]:
    return {"type": "string", "enum": list(values)}


TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD = {"type": "object"}  # validated as a Kubernetes PodTemplate

SECRET = _fields("secretKeyRef", secretKeyRef=_fields("name", "key", name=TEXT, key=TEXT))

AUTOSCALER = _fields(
    version=_one_of("v1", "v2"),
    upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
    idleTimeoutSeconds=COUNT,
    # As in a container, and validated as one.
    env={"type": "array"},
    resources={"type": "object"},
    securityContext={"type": "object"},
)

WORKER_GROUP = _fields(
    *("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)

SPEC = _fields(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=AUTOSCALER,
    authOptions=_fields(mode=_one_of("disabled", "token")),
    gcsFaultToleranceOptions=_fields(
        backend=_one_of("redis", "rocksdb"),
        redisAddress=TEXT,
        redisPassword=_fields(value=TEXT, valueFrom=SECRET),
    ),
    headGroupSpec=_fields("template", rayStartParams=TEXTS, template=POD),
    workerGroupSpecs={"type": "array", "items": WORKER_GROUP},
)

SCHEMA = _fields(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion=_one_of("ray.io/v1"),
    kind=_one_of("RayCluster"),
    metadata=_fields("name", name=TEXT, namespace=TEXT, labels=TEXTS),
    spec=SPEC,
)


def validate(cluster: Manifest, kubernetes: str) -> None:
    """Raises jsonschema's or kubernetes_validate's error for what an API server would refuse."""
    jsonschema.Draft202012Validator(SCHEMA).validate(cluster)
    for pod in pods([cluster]):
        _validate_pod(pod, kubernetes)
    options: dict[str, Any] = cluster["spec"].get("autoscalerOptions", {})
    shared = {key: options[key] for key in ("env", "resources", "securityContext")}
    container = {"name": "autoscaler", "image": "baton", **shared}
    _validate_pod({"spec": {"containers": [container]}}, kubernetes)


def _validate_pod(pod: Manifest, kubernetes: str) -> None:
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
    kubernetes_validate.validate({**template, "template": pod}, kubernetes, strict=True)

"""deploy/ray: what `ray up` would read."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import jsonschema
import yaml

CLUSTER = yaml.safe_load(
    (Path(__file__).parents[2] / "deploy" / "ray" / "cluster.yaml").read_text()
)


def test_it_keeps_to_rays_schema() -> None:
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(CLUSTER, schema)


def test_its_machines_offer_only_what_workers_ask_for() -> None:
    types = CLUSTER["available_node_types"]
    assert CLUSTER["head_node_type"] in types
    offered = {name for item in types.values() for name in item["resources"]}
    assert offered == {"CPU", "GPU"}


def test_every_ray_of_it_asks_for_the_token() -> None:
    for kind in ("head", "worker"):
        for command in CLUSTER[f"{kind}_start_ray_commands"]:
            assert re.search(r"RAY_AUTH_MODE=token .*bin/ray (start|stop)", command)

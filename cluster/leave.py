"""Has the workers of a node go on elsewhere, before the node goes.

1. Ray is told that the node leaves, and places nothing there any more.
2. Each worker there takes nothing new, finishes or hands back what it runs, and ends.
3. Ray starts it again, on another node: one with room, or one that is added for it.

The workers of all clusters on this Ray are asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2

from baton.cluster.joining import PREFIX, clusters, join
from baton.cluster.member import CONTROLLER, Member
from baton.core.errors import DeadlineExceeded, InvalidRequest, Unavailable

POLL_SECONDS = 0.2
MEMBERS_SECONDS = 5.0

_PREEMPTED = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def leave(ray_address: str, host: str, seconds: float) -> list[str]:
    """Returns when no worker serves at `host` any more; those that did. Empty `host` is here.

    Raises DeadlineExceeded when one still does after so many seconds.
    """
    deadline = time.monotonic() + seconds
    join(ray_address, PREFIX)
    try:
        host = host or str(ray.util.get_node_ip_address())
        _close(host, seconds)
        return _drain(host, deadline)
    finally:
        ray.shutdown()


def _close(host: str, seconds: float) -> None:
    """Has Ray place nothing on the nodes of a host, which will be gone after so many seconds."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == host]
    if not nodes:
        raise InvalidRequest(f"no node of this Ray is at {host}")
    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    gone_at = int((time.time() + seconds) * 1000)
    for node in nodes:
        accepted, reason = gcs.drain_node(node["NodeID"], _PREEMPTED, "baton leave", gone_at)
        if not accepted:
            raise Unavailable(f"Ray keeps using {host}: {reason}")


def _drain(host: str, deadline: float) -> list[str]:
    asked: list[str] = []
    for actor, member in _serving(host):
        actor.restart.remote()
        asked.append(member.worker_id)
    while any(_serving(host)):
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"workers at {host} still finish what they run")
        time.sleep(POLL_SECONDS)
    return asked


def _serving(host: str) -> Iterator[tuple[Any, Member]]:
    """The workers that serve at a host, of every cluster."""
    for namespace in clusters():
        for member in _members(namespace):
            if member.role and member.address.rpartition(":")[0] == host:
                yield ray.get_actor(member.worker_id, namespace), member


def _members(namespace: str) -> list[Member]:
    try:
        controller = ray.get_actor(CONTROLLER, namespace)
        found: list[Member] = ray.get(controller.members.remote(), timeout=MEMBERS_SECONDS)
    except (ValueError, ray.exceptions.RayError) as error:
        raise Unavailable(f"the controller of {namespace} does not answer: {error}") from error
    return found

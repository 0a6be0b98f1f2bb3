"""Ends a cluster, or moves the workers of a node elsewhere before the node is removed.

To leave a node:

1. Ray marks the node as draining, and places nothing there.
2. The node's workers, of all clusters on this Ray, drain and end.
3. Ray restarts them on other nodes, new ones if necessary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2

from baton.cluster.fleet import CONTROLLER, Member, is_router, is_worker
from baton.cluster.ray_session import (
    PREFIX,
    clear_store,
    clusters,
    find_actor,
    join,
    kill_actor,
    only_address,
)
from baton.core.errors import DeadlineExceeded, InvalidRequest, Unavailable

POLL_SECONDS = 0.1
LEAVE_POLL_SECONDS = 0.2
ANSWER_SECONDS = 5.0
"""Time for an actor's process to answer."""

_PREEMPTED = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def stop_cluster(seconds: float, stop_now: threading.Event) -> None:
    """Ends every actor of the joined namespace, then leaves Ray. Routers, then workers, get
    `seconds` each to finish their requests. Once `stop_now` is set, they end at once."""
    try:
        _stop_all(seconds, stop_now)
    except ray.exceptions.RayError as error:
        raise Unavailable(
            f"Ray cannot be reached; processes may still be running: {error}"
        ) from error
    finally:
        ray.shutdown()


def find_detached(address: str, name: str) -> tuple[str, str]:
    """Returns a Ray's address and the full name of a cluster there; see select_cluster."""
    address = only_address(address)
    join(address, PREFIX)
    found = clusters()
    ray.shutdown()
    try:
        return address, select_cluster(name, found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message} (on the Ray at {address})") from None


def stop_detached(address: str, name: str, seconds: float, stop_now: threading.Event) -> None:
    join(address, name)
    stop_cluster(seconds, stop_now)


def select_cluster(name: str, found: list[str]) -> str:
    """Returns the cluster called `name`, with or without the prefix. An empty name selects the
    only cluster."""
    if not found:
        raise InvalidRequest("there is no cluster")
    if not name and len(found) > 1:
        raise InvalidRequest(f"name one of {', '.join(found)}")
    for each in found:
        if not name or name in (each, each.removeprefix(PREFIX)):
            return each
    raise InvalidRequest(f"there is no cluster {name}, only {', '.join(found)}")


def _stop_all(seconds: float, stop_now: threading.Event) -> None:
    # First the controller, which would restart the others.
    kill_actor(CONTROLLER)
    names = ray.util.list_named_actors()
    # Routers first: their requests need the workers.
    _stop([name for name in names if is_router(name)], seconds, stop_now)
    _stop([name for name in names if is_worker(name)], seconds, stop_now)
    # Actors without a process are left.
    for name in ray.util.list_named_actors():
        kill_actor(name)
    clear_store()


def _stop(names: list[str], seconds: float, stop_now: threading.Event) -> None:
    deadline = time.monotonic() + seconds
    actors = _running(names)
    stops = [actor.stop.remote() for actor in actors]
    ending = False
    while stops and time.monotonic() < deadline:
        if stop_now.is_set() and not ending:
            ending = True
            for actor in actors:
                actor.stop_now.remote()
        _, stops = ray.wait(stops, num_returns=len(stops), timeout=POLL_SECONDS)


def _running(names: list[str]) -> list[Any]:
    """Returns the actors that have a process; Ray may still be placing the others."""
    actors = [actor for actor in map(find_actor, names) if actor]
    answers = {actor.__ray_ready__.remote(): actor for actor in actors}
    if not answers:
        return []
    ready, _ = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_SECONDS)
    return [answers[answer] for answer in ready]


def leave_node(ray_address: str, host: str, seconds: float) -> list[str]:
    """Moves the workers at `host` (empty: at this node) elsewhere. Returns their names once none
    serves there; raises DeadlineExceeded after `seconds`."""
    deadline = time.monotonic() + seconds
    join(only_address(ray_address), PREFIX)
    try:
        host = host or str(ray.util.get_node_ip_address())
        _drain_nodes(host, seconds)
        return _drain_workers(host, deadline)
    finally:
        ray.shutdown()


def _drain_nodes(host: str, seconds: float) -> None:
    """Announces to Ray that the host's nodes will be gone in `seconds`, so that it places nothing
    there."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == host]
    if not nodes:
        raise InvalidRequest(f"no node of this Ray is at {host}")
    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    gone_at = int((time.time() + seconds) * 1000)
    for node in nodes:
        accepted, reason = gcs.drain_node(node["NodeID"], _PREEMPTED, "baton leave", gone_at)
        if not accepted:
            raise Unavailable(f"Ray refuses to drain {host}: {reason}")


def _drain_workers(host: str, deadline: float) -> list[str]:
    drained: list[str] = []
    for actor, member in _serving(host):
        actor.restart.remote()
        drained.append(member.worker_id)
    while any(_serving(host)):
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"workers at {host} still finish their requests")
        time.sleep(LEAVE_POLL_SECONDS)
    return drained


def _serving(host: str) -> Iterator[tuple[Any, Member]]:
    """Yields the workers that serve at a host, of every cluster."""
    for namespace in clusters():
        for member in _members(namespace):
            if member.role and member.address.rpartition(":")[0] == host:
                yield ray.get_actor(member.worker_id, namespace), member


def _members(namespace: str) -> list[Member]:
    try:
        controller = ray.get_actor(CONTROLLER, namespace)
        found: list[Member] = ray.get(controller.members.remote(), timeout=ANSWER_SECONDS)
    except (ValueError, ray.exceptions.RayError) as error:
        raise Unavailable(f"the controller of {namespace} does not answer: {error}") from error
    return found

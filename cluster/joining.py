"""Joins Ray: one that is started here, or somebody's."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from baton.cluster.preflight import check_ray
from baton.core.errors import Unavailable

PREFIX = "baton-"
"""Of every cluster's Ray namespace."""

# Nothing of ours goes through Ray's object store; this is the least it takes.
_OBJECT_STORE_BYTES = 80 * 2**20
_QUIET = {"log_to_driver": False, "configure_logging": False}


def join(address: str, namespace: str) -> str:
    """The folder of Ray's logs on this machine."""
    _be_quiet()
    check_ray(address)
    try:
        context = ray.init(address, namespace=namespace, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise Unavailable(f"cannot join Ray at {address}: {error}") from error
    return _log_folder(context)


def start(namespace: str, processes: int) -> str:
    """A Ray that ends with this process; so many processes are wanted soon."""
    _be_quiet()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would let everything else on the machine go before our workers.
    os.environ.setdefault("RAY_worker_niceness", "0")
    context = ray.init(
        "local",
        namespace=namespace,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        # Our actors ask for none; Ray gets as many processes ready, while it starts.
        num_cpus=processes,
        **_QUIET,
    )
    return _log_folder(context)


def whole(address: str) -> str:
    """`address`, with this node's host where it has none: ":51000"."""
    host = str(ray.util.get_node_ip_address()) if address.startswith(":") else ""
    return host + address


def clusters() -> list[str]:
    """The namespaces of all clusters on the Ray that was joined."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted({str(actor["namespace"]) for actor in actors if _is_ours(actor["namespace"])})


def _is_ours(namespace: str) -> bool:
    return namespace.startswith(PREFIX)


def _be_quiet() -> None:
    """Ray would announce what is no news here: that it authenticates its processes, and that it
    leaves the signals to us."""
    logging.getLogger("ray").setLevel(logging.ERROR)


def _log_folder(context: Any) -> str:
    return f"{context.address_info['session_dir']}/logs"

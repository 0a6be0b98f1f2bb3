"""Joins or starts Ray, and stores a cluster's state in Ray's key-value store.

Each cluster has its own Ray namespace. A restarted controller loads the fleet from the store, and
a restarted worker its role. The store lives as long as Ray's head, or as the Redis behind it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import ray
from ray._common import utils as ray_utils
from ray._private import services, state
from ray.experimental import internal_kv
from ray.job_config import JobConfig

from baton.cluster import fleet as fleets
from baton.cluster import own_ray
from baton.cluster.fleet import Fleet
from baton.core.errors import InvalidConfig, InvalidRequest, Unavailable
from baton.core.process import end_after
from baton.v1 import cluster_pb2 as pb

INIT_SECONDS = 120.0
"""The longest that Ray may take to start, or to let this process join."""

RECONNECT_SECONDS = 30
"""After the end of its head, Ray ends a process that needs it. `baton serve` ends sooner, if a
thread holds no lock."""

PREFIX = "baton-"
"""Every cluster's Ray namespace begins with this."""

# Baton puts nothing into Ray's object store; this is the store's minimum.
_OBJECT_STORE_BYTES = 80 * 2**20
_QUIET = {"log_to_driver": False, "configure_logging": False}
# Keys in the store.
_FLEET, _START, _ADAPTERS, _MODELS = "fleet", "start", "adapters", "models"

_CONNECT_SECONDS = 3.0
_GET_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def check_ray(address: str) -> None:
    """Raises if no Ray at `address` can be joined. Ray itself would retry and log for long."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise InvalidConfig(f"--ray-address must be HOST:PORT or auto, not {address!r}")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"no Ray cluster answers at {address}: {reason}") from None
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode not in ("", "token") or not _refuses_token(address, _token() if mode else {}):
        return
    if mode:
        raise InvalidConfig(
            f"the Ray at {address} refuses the token from here: set RAY_AUTH_TOKEN, or write to"
            " ~/.ray/auth_token, the token that Ray was started with"
        )
    raise InvalidConfig(
        f"the Ray at {address} asks for a token, which Ray does not send by default: set"
        " RAY_AUTH_MODE=token"
    )


def _token() -> dict[str, str]:
    """Returns the authentication header that Ray would send, from the environment or a file."""
    from ray import _raylet

    tokens = _raylet.AuthenticationTokenLoader.instance()  # type: ignore[attr-defined]
    header: dict[str, str] = tokens.get_token_for_http_header() if tokens.has_token() else {}
    return header


def _refuses_token(address: str, header: Mapping[str, str]) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_GET_CLUSTER_ID)
            call(b"", timeout=_CONNECT_SECONDS, metadata=tuple(header.items()))
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def join(address: str, namespace: str) -> str:
    """Joins a running Ray. Returns the folder of its logs on this machine."""
    _silence_ray()
    check_ray(address)
    try:
        with _limited():
            context = ray.init(address, namespace=namespace, job_config=_job(), **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise Unavailable(f"cannot join Ray at {address}: {error}") from error
    return _log_folder(context)


def only_address(address: str) -> str:
    """Resolves "auto" to RAY_ADDRESS, or to the only Ray that this machine is part of. Ray itself
    would take any of several."""
    if address != "auto":
        return address
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    # The bootstrap file names the last Ray started, which may run in another container.
    found = services.find_gcs_addresses() or {services.find_bootstrap_address(None)} - {None}
    if not found:
        raise Unavailable("no Ray runs on this machine; give the --ray-address of one")
    if len(found) > 1:
        raise InvalidRequest(
            f"several Rays run on this machine; give --ray-address {' or '.join(sorted(found))}"
        )
    (only,) = found
    return str(only)


def start(namespace: str, processes: int) -> str:
    """Starts a Ray that ends with this process and prepares `processes` workers. Returns the
    folder of its logs."""
    _silence_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray's workers yield to everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A Ray started here never gets another head. By default, its processes wait 60 s for one, this
    # one with Python's lock held.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_SECONDS))
    try:
        with own_ray.few_processes(), _limited():
            context = ray.init(
                "local",
                namespace=namespace,
                job_config=_job(),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                # Our actors request none; Ray prestarts this number of processes.
                num_cpus=processes,
                **_QUIET,
            )
    except Exception as error:  # Ray raises a plain Exception when the machine is too busy
        logs = f"{ray_utils.get_default_ray_temp_dir()}/session_latest/logs"
        reason = str(error).rstrip(".")
        raise Unavailable(f"Ray cannot start: {reason}; its logs are in {logs}") from error
    return _log_folder(context)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends this process, with its stacks on stderr, if the block takes too long. Ray waits for a
    node's answer without limit, with Python's lock held: no thread could handle a signal."""
    end_after(INIT_SECONDS)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _NoPaths(list[str]):
    def extend(self, paths: Iterable[str]) -> None:
        """Keeps the current folder out of the workers' import path. Ray would put it first, and
        code in a model's folder would be imported and run."""


def _job() -> JobConfig:
    made = JobConfig()
    made._py_driver_sys_path = _NoPaths()
    return made


def complete(address: str) -> str:
    """Adds this node's host to an address without one, such as ":51000"."""
    host = str(ray.util.get_node_ip_address()) if address.startswith(":") else ""
    return host + address


def clusters() -> list[str]:
    """Returns the namespaces of all clusters on the joined Ray."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    namespaces = {str(actor["namespace"]) for actor in actors}
    return sorted(name for name in namespaces if name.startswith(PREFIX))


def find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def restarted_actors() -> list[str]:
    """Names the actors made by this process that Ray has restarted."""
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return sorted(each["Name"] for each in state.actors(job_id=job).values() if each["NumRestarts"])


def kill_actor(name: str) -> None:
    """Kills an actor, if it exists. Ray does not restart it."""
    if actor := find_actor(name):
        ray.kill(actor)


@dataclass(frozen=True, slots=True)
class StartRecord:
    """The configuration that a cluster was started with, and its controller's address."""

    tree: dict[str, object]
    controller: str


def save_fleet(fleet: Fleet) -> None:
    _put(_FLEET, fleets.dump(fleet))


def load_fleet() -> Fleet:
    return fleets.parse(_get(_FLEET))


def save_adapters(adapters: Mapping[str, pb.NamedAdapter]) -> None:
    _put(_ADAPTERS, pb.Members(adapters=adapters.values()).SerializeToString())


def load_adapters() -> dict[str, pb.NamedAdapter]:
    """Returns adapters by name. Removed ones are entries without an adapter."""
    held = pb.Members.FromString(_get(_ADAPTERS) or b"")
    return {named.name: named for named in held.adapters}


def save_models(models: Sequence[tuple[str, str, bool]]) -> None:
    _put(_MODELS, json.dumps(models))


def load_models() -> list[tuple[str, str, bool]]:
    """Returns (name, keys, removed) of each model; nothing before the first change."""
    held = _get(_MODELS)
    return [tuple(each) for each in json.loads(held)] if held else []


def save_start(start: StartRecord) -> None:
    _put(_START, json.dumps([start.tree, start.controller]))


def load_start() -> StartRecord | None:
    text = _get(_START)
    return StartRecord(*json.loads(text)) if text else None


def clear_store() -> None:
    for key in (_FLEET, _START, _ADAPTERS, _MODELS):
        internal_kv._internal_kv_del(key, namespace=_namespace())


def _put(key: str, value: str | bytes) -> None:
    try:
        internal_kv._internal_kv_put(key, value, namespace=_namespace())
    except ray.exceptions.RayError as error:
        raise Unavailable(f"Ray's head cannot be reached: {error}") from error


def _get(key: str) -> Any:
    """Returns bytes, or None."""
    return internal_kv._internal_kv_get(key, namespace=_namespace())


def cluster_name() -> str:
    """Returns a name that no other cluster on this node has or had."""
    return f"{ray.get_runtime_context().gcs_address}/{_namespace()}"


def _namespace() -> str:
    return str(ray.get_runtime_context().namespace)


def _silence_ray() -> None:
    """Hides Ray's notes on authentication and on signal handlers."""
    logging.getLogger("ray").setLevel(logging.ERROR)


def _log_folder(context: Any) -> str:
    return f"{context.address_info['session_dir']}/logs"

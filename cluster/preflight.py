"""What can be known to be wrong before anything is started: told at once, in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import socket

import grpc

from baton.core import model_store
from baton.core.config import Config, RouterConfig
from baton.core.errors import InvalidConfig, Unavailable
from baton.core.tls import check_router, node_identity
from baton.engine.architecture import Architecture, read_architecture
from baton.worker.rank_process import check_ranks

# Bytes of one K or V value; "auto" is told apart by the worker, which sees the device.
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}

# Above those of Ray's workers, below those that Linux gives to connections.
_UNASKED_PORTS = range(24_000, 32_768)

_CONNECT_SECONDS = 3.0
_GET_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def check(config: Config) -> None:
    """Raises InvalidConfig if a cluster could not serve `config` on this machine."""
    check_router(config)
    node_identity(config)
    architecture = read_architecture(model_store.locate(config.model))
    _check_pools(config, architecture)
    _check_planner(config)
    prefill, decode = config.prefill, config.decode
    check_ranks(prefill.tensor_parallel, architecture, prefill.gpu_share)
    check_ranks(decode.tensor_parallel, architecture)


def _check_pools(config: Config, architecture: Architecture) -> None:
    values = architecture.layers * architecture.kv_heads * architecture.head_dim * 2
    page_bytes = values * config.page_size * _VALUE_BYTES[config.dtype]
    for name, kv_memory in (
        ("prefill.kv_memory", config.prefill.kv_memory),
        ("decode.kv_memory", config.decode.kv_memory),
    ):
        if 0 < kv_memory < page_bytes:
            raise InvalidConfig(
                f"{name} of {int(kv_memory)} bytes holds no page: one takes {page_bytes}",
                field=name,
            )


def _check_planner(config: Config) -> None:
    planner = config.planner
    least = planner.least_prefill + planner.least_decode
    most = planner.most_workers or config.prefill.workers + config.decode.workers
    if planner.enabled and least > most:
        raise InvalidConfig(
            f"the planner is to keep {least} workers and may have {most}",
            field="planner.most_workers",
        )


def check_ports(router: RouterConfig) -> None:
    """Raises InvalidConfig if routers could not listen: takes all ports for a moment, so that two
    that are the same are found too."""
    with contextlib.ExitStack() as held:
        for index in range(router.count):
            ports = numbered(router, index)
            for name in ("port", "http_port", "metrics_port"):
                held.enter_context(take_port(router.host, getattr(ports, name), f"router.{name}"))


def take_port(host: str, port: int, field: str) -> socket.socket:
    """Listens on the port that `field` of the configuration names; 0 is any that is free."""
    try:
        return _listen(host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            f"cannot listen on {host}:{port} ({field}): {reason}", field=field
        ) from None


def numbered(router: RouterConfig, index: int) -> RouterConfig:
    """The settings of one of several routers. Ports that are 0 stay 0."""
    return dataclasses.replace(
        router,
        port=router.port and router.port + index,
        http_port=router.http_port and router.http_port + index,
        metrics_port=router.metrics_port and router.metrics_port + index,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on, nor gets before it is used without asking for it
    by number."""
    for port in random.sample(_UNASKED_PORTS, len(_UNASKED_PORTS)):
        with contextlib.suppress(OSError), _listen(host, port):
            return port
    raise Unavailable(f"no port of {host} from {_UNASKED_PORTS[0]} to {_UNASKED_PORTS[-1]} is free")


def check_ray(address: str) -> None:
    """Raises if a Ray at `address` cannot be joined; Ray itself would try for long, and aloud."""
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
    if not os.environ.get("RAY_AUTH_MODE") and _wants_token(address):
        raise InvalidConfig(
            f"the Ray at {address} asks for a token, which Ray sends to an address only when"
            " told to: set RAY_AUTH_MODE=token"
        )


def _wants_token(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_GET_CLUSTER_ID)
            call(b"", timeout=_CONNECT_SECONDS)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False

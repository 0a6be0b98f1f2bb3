"""The ports of routers and of workers."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket

from baton.core.config import RouterConfig
from baton.core.errors import InvalidConfig, Unavailable

# Above the ports of Ray's workers, below those that Linux gives to connections.
_FREE_PORTS = range(24_000, 32_768)
# Abstract Unix sockets that reserve ports; the kernel closes them with the process.
_reservations: list[socket.socket] = []


def check_ports(router: RouterConfig) -> None:
    """Raises InvalidConfig if routers cannot listen. Holds all ports at once to find duplicates
    too."""
    with contextlib.ExitStack() as held:
        for index in range(router.count):
            ports = offset_ports(router, index)
            for name in ("port", "http_port", "metrics_port"):
                held.enter_context(take_port(router.host, getattr(ports, name), f"router.{name}"))


def take_port(host: str, port: int, field: str) -> socket.socket:
    """Listens on the port of a configuration field; 0 means any free one."""
    try:
        return _listen(host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            f"cannot listen on {host}:{port} ({field}): {reason}", field=field
        ) from None


def offset_ports(router: RouterConfig, index: int) -> RouterConfig:
    """Returns the settings of router number `index`: its ports are `index` higher, except 0."""
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
    """Returns a free port outside the ranges from which Ray and Linux assign ports.

    It is reserved until this process ends, since the process that will listen may start late.
    """
    for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
        with contextlib.suppress(OSError):
            reservation = _reserve(port)
            with _listen(host, port):
                _reservations.append(reservation)
                return port
    raise Unavailable(f"no port of {host} from {_FREE_PORTS[0]} to {_FREE_PORTS[-1]} is free")


def _reserve(port: int) -> socket.socket:
    """Raises OSError if a process of this network namespace has reserved the port."""
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    reservation.bind(f"\0baton-port-{port}")
    return reservation

"""What may be reached from other machines, and whether that was meant."""

from __future__ import annotations

import ipaddress

from core.config import Config
from core.errors import InvalidConfig


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_router(config: Config) -> None:
    """Raises InvalidConfig where anybody on the network could use a router."""
    router = config.router
    if not (is_loopback(router.host) or router.keys or config.insecure):
        raise InvalidConfig(
            f"other machines can reach {router.host}, and nothing is locked: make a key with"
            " `baton keys add` and give router.keys (--keys), or say insecure (--insecure)",
            field="router.host",
        )

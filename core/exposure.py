"""What may be reached from other machines, and whether that was meant."""

from __future__ import annotations

import ipaddress
import logging

from baton.core.config import Config
from baton.core.errors import InvalidConfig

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_router(config: Config) -> None:
    """Raises InvalidConfig where anybody on the network could use a router."""
    router, tls = config.router, config.tls
    if is_loopback(router.host):
        return
    if not (router.keys or tls.client_certificates or config.insecure):
        raise InvalidConfig(
            f"other machines can reach {router.host}, and nothing is locked: make a key with"
            " `baton keys add` and give router.keys (--keys), or say insecure (--insecure)",
            field="router.host",
        )
    if not tls.folder:
        log.warning("what clients send to %s can be read on its way: see tls.folder", router.host)


def check_worker(config: Config, host: str) -> None:
    """Raises InvalidConfig where anybody on the network could use a worker."""
    if not (is_loopback(host) or config.tls.folder or config.insecure):
        raise InvalidConfig(
            f"other machines can reach a worker at {host}, and it would obey them: give"
            " tls.folder (--tls), or say insecure (--insecure)",
            field="insecure",
        )

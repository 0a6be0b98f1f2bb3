"""The folder of certificates (`baton certs` makes one), and who may listen without it.

    ca.pem                      signs the cluster's own processes
    node.pem, node.key          identity of such a process, as a server and as a client
    clients-ca.pem              signs clients, if they must present a certificate
    client.pem, client.key      identity of a client

There are two authorities so that a client of a router cannot talk to workers.
"""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import InvalidConfig

if TYPE_CHECKING:
    from baton.core.config import Config  # needs YAML, which a client lacks

log = logging.getLogger(__name__)

CA, NODE, CLIENTS_CA, CLIENT = "ca", "node", "clients-ca", "client"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process's certificate and key in PEM, and the authority that must have signed its peers'
    certificates (None: peers need none)."""

    certificate: bytes
    key: bytes
    authority: bytes | None


def node_identity(config: Config) -> Identity | None:
    """A process's identity within the cluster; None without TLS."""
    if not config.tls.folder:
        return None
    folder = Path(config.tls.folder)
    return Identity(
        read_pem(certificate_path(folder, NODE)),
        read_pem(key_path(folder, NODE)),
        read_pem(certificate_path(folder, CA)),
    )


def edge_identity(config: Config) -> Identity | None:
    """A router's identity for its clients; None without TLS."""
    node = node_identity(config)
    if node is None or not config.tls.client_certificates:
        return node and Identity(node.certificate, node.key, None)
    clients = read_pem(certificate_path(Path(config.tls.folder), CLIENTS_CA))
    return Identity(node.certificate, node.key, clients)


def certificate_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.pem"


def key_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.key"


def read_pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}", field="tls.folder") from error


def check_router(config: Config) -> None:
    """Raises InvalidConfig if anybody on the network could use the router."""
    router, tls = config.router, config.tls
    if is_loopback(router.host):
        return
    if not (router.keys or tls.client_certificates or config.insecure):
        raise InvalidConfig(
            f"other machines can reach {router.host}, which requires no key: make one with"
            " `baton keys add` and set router.keys (--keys), or set insecure (--insecure)",
            field="router.host",
        )
    if not tls.folder:
        log.warning("clients' traffic to %s is not encrypted: see tls.folder", router.host)


def check_worker(config: Config, host: str) -> None:
    """Raises InvalidConfig if anybody on the network could use the worker."""
    if not (is_loopback(host) or config.tls.folder or config.insecure):
        raise InvalidConfig(
            f"other machines can reach and control a worker at {host}: set tls.folder (--tls), or"
            " insecure (--insecure)",
            field="insecure",
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

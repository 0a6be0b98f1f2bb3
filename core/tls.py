"""Certificates, as a folder keeps them. `baton certs` makes such a folder.

    ca.pem                      signs the cluster's own processes
    node.pem, node.key          one of these: it shows them to whoever calls it, and to the
                                processes that it calls
    clients-ca.pem              signs clients, where these must show a certificate
    client.pem, client.key      one of these

Two authorities, because a client that may ask a router is not to talk to workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import InvalidConfig

if TYPE_CHECKING:
    from baton.core.config import Config  # a client has no YAML

CA, NODE, CLIENTS_CA, CLIENT = "ca", "node", "clients-ca", "client"


@dataclass(frozen=True, slots=True)
class Identity:
    """In PEM: what a process shows, and who has signed what others show it (None where these
    need not show anything)."""

    certificate: bytes
    key: bytes
    authority: bytes | None


def node_identity(config: Config) -> Identity | None:
    """What a process of the cluster is among the others; None where they speak in the clear."""
    if not config.tls.folder:
        return None
    folder = Path(config.tls.folder)
    return Identity(
        read_pem(certificate_path(folder, NODE)),
        read_pem(key_path(folder, NODE)),
        read_pem(certificate_path(folder, CA)),
    )


def door_identity(config: Config) -> Identity | None:
    """What a router is for its clients."""
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

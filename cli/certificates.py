"""Certificates for development: two authorities, a node and a client (core/tls.py).

Keys are elliptic curves (P-256). An existing authority is used again, so that new nodes and
certificates fit the old ones.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.core.tls import CA, CLIENT, CLIENTS_CA, NODE, certificate_path, key_path, read_pem

_CLOCKS_DIFFER = timedelta(hours=1)
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Fills `folder`. `hosts` are the names and addresses of nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = _authority(folder, CA, "Baton development CA", days)
    clients = _authority(folder, CLIENTS_CA, "Baton development CA for clients", days)
    _issue(folder, NODE, nodes, hosts, (_SERVER, _CLIENT), days)
    _issue(folder, CLIENT, clients, (), (_CLIENT,), days)


def _authority(folder: Path, name: str, title: str, days: int) -> Authority:
    if certificate_path(folder, name).exists():
        certificate = x509.load_pem_x509_certificate(read_pem(certificate_path(folder, name)))
        key = serialization.load_pem_private_key(read_pem(key_path(folder, name)), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return Authority(certificate, key)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(title)
    certificate = (
        _builder(subject, subject, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder, name, certificate, key)
    return Authority(certificate, key)


def _issue(
    folder: Path,
    name: str,
    authority: Authority,
    hosts: Sequence[str],
    purposes: Sequence[x509.ObjectIdentifier],
    days: int,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(_named(f"baton {name}"), authority.certificate.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(issuer, critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    _write(folder, name, builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _CLOCKS_DIFFER,
        not_valid_after=now + timedelta(days=days),
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return builder.add_extension(identifier, critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    unused = (
        *("content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        **dict.fromkeys(unused, False),
    )


def _named(title: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """The key is readable by its owner alone."""
    path = key_path(folder, name)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    certificate_path(folder, name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

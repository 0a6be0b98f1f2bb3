"""Makes certificates for development: two authorities, a node and a client (core/tls.py).

Keys are on the elliptic curve P-256. An existing authority is reused, so that new certificates work
with the old ones.
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
class KeyedCertificate:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Fills `folder`. `hosts` are the names and addresses of nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = _authority(folder, CA, "Baton development CA", days)
    clients = _authority(folder, CLIENTS_CA, "Baton development CA for clients", days)
    named = [x509.SubjectAlternativeName([_host(host) for host in hosts])] if hosts else []
    both = x509.ExtendedKeyUsage([_SERVER, _CLIENT])
    _write(folder, NODE, _issue(f"baton {NODE}", days, nodes, both, *named))
    client_only = x509.ExtendedKeyUsage([_CLIENT])
    _write(folder, CLIENT, _issue(f"baton {CLIENT}", days, clients, client_only))


def _authority(folder: Path, name: str, title: str, days: int) -> KeyedCertificate:
    if certificate_path(folder, name).exists():
        certificate = x509.load_pem_x509_certificate(read_pem(certificate_path(folder, name)))
        key = serialization.load_pem_private_key(read_pem(key_path(folder, name)), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return KeyedCertificate(certificate, key)
    made = _issue(title, days, None)
    _write(folder, name, made)
    return made


def _issue(
    title: str, days: int, authority: KeyedCertificate | None, *extensions: x509.ExtensionType
) -> KeyedCertificate:
    """Issues a certificate signed by `authority`, or without one a new authority's."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=authority.certificate.subject if authority else subject,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _CLOCKS_DIFFER,
        not_valid_after=now + timedelta(days=days),
    )
    signs = authority is None
    constraints = x509.BasicConstraints(ca=signs, path_length=0 if signs else None)
    for critical in (constraints, _usage(signs=signs)):
        builder = builder.add_extension(critical, critical=True)
    identifiers: list[x509.ExtensionType] = [
        x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    ]
    if authority:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
        identifiers.append(issuer)
    for extension in (*identifiers, *extensions):
        builder = builder.add_extension(extension, critical=False)
    return KeyedCertificate(builder.sign(authority.key if authority else key, hashes.SHA256()), key)


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


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, name: str, made: KeyedCertificate) -> None:
    """Writes the certificate, and the key, which only its owner may read."""
    path = key_path(folder, name)
    path.touch(mode=0o600)
    path.chmod(0o600)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    path.write_bytes(made.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    certificate_path(folder, name).write_bytes(made.certificate.public_bytes(pem))

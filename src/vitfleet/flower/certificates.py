"""A fleet's certificates and keys: a certificate authority, the server's certificate, a key pair for every device.

Everything lies in one folder, which belongs to the server. A device is given two files of it, by hand: ``ca.crt`` and
``nodes/<its name>``. Made again, what is there stays, and what is missing is added.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from vitfleet.errors import UserError

CURVE = ec.SECP384R1()
LOOPBACK = ("127.0.0.1", "localhost")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Certs:
    """Where in a fleet's folder what lies."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority's certificate, which everybody knows."""
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """The authority's key: whoever has it can pretend to be the server."""
        return self.folder / "ca.key"

    @property
    def server(self) -> Path:
        """The server's certificate."""
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        """The server's key."""
        return self.folder / "server.key"

    @property
    def home(self) -> Path:
        """What Flower's processes on the server write: logs, the app."""
        return self.folder / "flower"

    def node_key(self, name: str) -> Path:
        """Return where a device's private key lies."""
        return self.folder / "nodes" / name

    def node_public_key(self, name: str) -> Path:
        """Return where a device's public key lies."""
        return self.folder / "nodes" / f"{name}.pub"

    def names(self) -> list[str]:
        """Return the names of the devices that have a key, in the order of the alphabet."""
        return sorted(path.name.removesuffix(".pub") for path in (self.folder / "nodes").glob("*.pub"))

    def check_server(self) -> None:
        """Complain if something that a server needs is not there."""
        for path in (self.ca, self.server, self.server_key):
            if not path.is_file():
                raise UserError(
                    f"{path}: is not there; `vitfleet certs {self.folder} --host HOST --names A,B` makes it"
                )

    def check_client(self, name: str) -> None:
        """Complain if something that a device needs is not there."""
        for path in (self.ca, self.node_key(name)):
            if not path.is_file():
                raise UserError(f"{path}: is not there; copy it from the server, where `vitfleet certs` made it")


def make_certs(folder: Path, hosts: Sequence[str], names: Sequence[str], days: int = 3650) -> Certs:
    """Make what is missing of a fleet's certificates and keys.

    Parameters
    ----------
    hosts
        Names and addresses under which devices reach the server; this machine's own loopback is added.
    names
        The devices' names.
    days
        How long certificates are good for.
    """
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(f"{name!r}: a device's name must be letters, digits, '.', '_' and '-', at most 63")
    certs = Certs(folder)
    (folder / "nodes").mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not certs.ca.exists():
        _make_authority(certs, days)
    if hosts or not certs.server.exists():
        _make_server(certs, [*hosts, *(host for host in LOOPBACK if host not in hosts)], days)
    for name in names:
        if not certs.node_key(name).exists():
            _make_node(certs, name)
    return certs


def _make_authority(certs: Certs, days: int) -> None:
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vitfleet authority")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _certificate(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_secret(certs.ca_key, _pem(key))
    certs.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _make_server(certs: Certs, hosts: Sequence[str], days: int) -> None:
    authority = x509.load_pem_x509_certificate(certs.ca.read_bytes())
    authority_key = serialization.load_pem_private_key(certs.ca_key.read_bytes(), password=None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vitfleet server")])
    certificate = (
        _certificate(name, authority.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    _write_secret(certs.server_key, _pem(key))
    certs.server.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _make_node(certs: Certs, name: str) -> None:
    """Make a device's key pair, in OpenSSH's form, as Flower wants it."""
    key = ec.generate_private_key(CURVE)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_secret(certs.node_key(name), private)
    certs.node_public_key(name).write_bytes(public + b"\n")


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # A device's clock may be behind.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file that nobody but its owner can ever have read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)

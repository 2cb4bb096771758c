"""A fleet's certificates and keys: a certificate authority, the server's certificate, a key pair for every client.

All files are in one folder on the server. Copy two of them to each client by hand: ``ca.crt`` and ``nodes/NAME``. A
second call keeps existing files and adds missing ones.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from vitfleet.errors import UserError
from vitfleet.files import make_folder
from vitfleet.flower.processes import check_client_name

CURVE = ec.SECP384R1()
VALIDITY = timedelta(days=3650)
LOOPBACK = ("127.0.0.1", "localhost")


class Certs:
    """Paths of a fleet's certificates and keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.crt"  # the authority's certificate: clients use it to verify the server
        self.ca_key = folder / "ca.key"  # the authority's private key: its holder can impersonate the server
        self.server = folder / "server.crt"
        self.server_key = folder / "server.key"
        self.home = folder / "flower"  # files of Flower's processes on the server: logs, the app

    def node_key(self, name: str) -> Path:
        """Return the path of a client's private key."""
        return self.folder / "nodes" / name

    def node_public_key(self, name: str) -> Path:
        """Return the path of a client's public key."""
        return self.folder / "nodes" / f"{name}.pub"

    def names(self) -> list[str]:
        """Return the names of the clients that have a key, sorted."""
        return sorted(path.name.removesuffix(".pub") for path in (self.folder / "nodes").glob("*.pub"))

    def check_server(self, names: Sequence[str] = ()) -> None:
        """Raise an error if a file that the server of these clients needs is missing or damaged."""
        create = f"`vitfleet certs {self.folder} --host HOST --names A,B` creates it"
        _check_readable(self.ca, x509.load_pem_x509_certificate, create)
        _check_readable(self.server, x509.load_pem_x509_certificate, create)
        _check_readable(self.server_key, partial(serialization.load_pem_private_key, password=None), create)
        if missing := [name for name in names if not self.node_public_key(name).is_file()]:
            raise UserError(
                f"client {missing[0]} has no key in {self.folder}; `vitfleet certs {self.folder} --names "
                f"{','.join(missing)}` makes it"
            )

    def check_client(self, name: str) -> None:
        """Raise an error if a file that a client needs is missing or damaged."""
        copy = "copy it from the server, where `vitfleet certs` created it"
        _check_readable(self.ca, x509.load_pem_x509_certificate, copy)
        _check_readable(self.node_key(name), partial(serialization.load_ssh_private_key, password=None), copy)


def _check_readable(path: Path, read: Callable[[bytes], object], remedy: str) -> None:
    """Raise an error with the remedy if there is no file, or one that is no certificate or no key."""
    if not path.is_file():
        raise UserError(f"{path}: missing; {remedy}")
    try:
        read(path.read_bytes())
    except ValueError:
        kind = "certificate" if path.suffix == ".crt" else "key"
        raise UserError(f"{path}: is damaged, or no {kind}; restore it, or remove it and {remedy}") from None


def make_certs(folder: Path, hosts: Sequence[str], names: Sequence[str]) -> Certs:
    """Create the missing certificates and keys of a fleet, for these names of clients.

    ``hosts`` are names and addresses under which clients reach the server; this machine's loopback is added.
    """
    for name in names:
        check_client_name(name)
    certs = Certs(folder)
    make_folder(folder / "nodes", "DIR")
    folder.chmod(0o700)
    if not certs.ca.exists():
        _make_authority(certs)
    if hosts or not certs.server.exists():
        _make_server(certs, [*hosts, *(host for host in LOOPBACK if host not in hosts)])
    for name in names:
        if not certs.node_key(name).exists():
            _make_node(certs, name)
    return certs


def _make_authority(certs: Certs) -> None:
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vitfleet authority")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _certificate_builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_secret(certs.ca_key, _pem(key))
    certs.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _make_server(certs: Certs, hosts: Sequence[str]) -> None:
    authority = x509.load_pem_x509_certificate(certs.ca.read_bytes())
    authority_key = serialization.load_pem_private_key(certs.ca_key.read_bytes(), password=None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vitfleet server")])
    certificate = (
        _certificate_builder(name, authority.subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    _write_secret(certs.server_key, _pem(key))
    certs.server.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _make_node(certs: Certs, name: str) -> None:
    """Create a client's key pair in OpenSSH's format, which Flower requires."""
    key = ec.generate_private_key(CURVE)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_secret(certs.node_key(name), private)
    certs.node_public_key(name).write_bytes(public + b"\n")


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # A client's clock may be slow.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALIDITY)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from the moment of its creation."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)

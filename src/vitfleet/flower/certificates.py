"""A fleet's certificates and keys: a certificate authority, the server's certificate, a key pair for every client.

All files are in one folder on the server. Copy two of them to each client by hand: ``ca.crt`` and ``nodes/NAME``. A
second call keeps existing files and adds missing ones. :func:`check_authority` looks at a server's certificate before
Flower connects, which answers a wrong one with a traceback.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from vitfleet.errors import UserError
from vitfleet.flower.processes import check_client_name

CURVE = ec.SECP384R1()
VALIDITY = timedelta(days=3650)
LOOPBACK = ("127.0.0.1", "localhost")
CONNECT_TIMEOUT_S = 10.0


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

    def check_server(self) -> None:
        """Raise an error if a file that the server needs is missing."""
        for path in (self.ca, self.server, self.server_key):
            if not path.is_file():
                raise UserError(f"{path}: missing; `vitfleet certs {self.folder} --host HOST --names A,B` creates it")

    def check_client(self, name: str) -> None:
        """Raise an error if a file that a client needs is missing."""
        for path in (self.ca, self.node_key(name)):
            if not path.is_file():
                raise UserError(f"{path}: missing; copy it from the server, where `vitfleet certs` created it")


def make_certs(folder: Path, hosts: Sequence[str], names: Sequence[str]) -> Certs:
    """Create the missing certificates and keys of a fleet, for these names of clients.

    ``hosts`` are names and addresses under which clients reach the server; this machine's loopback is added.
    """
    for name in names:
        check_client_name(name)
    certs = Certs(folder)
    (folder / "nodes").mkdir(parents=True, exist_ok=True)
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


def check_authority(address: str, ca: Path) -> None:
    """Check that the certificate of the server at ``HOST:PORT`` is of this fleet's authority, and for this host.

    A server that does not answer is not checked.
    """
    host, _, port = address.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError:
        raise UserError(
            f"{ca}: is no certificate; copy it from the server, where `vitfleet certs` created it"
        ) from None
    try:
        number = int(port)
    except ValueError:
        raise UserError(f"--server {address}: must be HOST or HOST:PORT") from None
    try:
        with (
            socket.create_connection((host.strip("[]"), number), timeout=CONNECT_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"the server at {address} is not the one that {ca} belongs to ({error.verify_message}); copy ca.crt and "
            "nodes/NAME from the server, and use a host name that its certificate has"
        ) from None
    except OSError:  # not running yet: a client waits for its server
        return

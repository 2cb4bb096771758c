"""Certificates are valid for OpenSSL, keys readable by Flower, and private files readable by their owner only."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vitfleet.errors import UserError
from vitfleet.flower.certificates import Certs, make_certs


def tls_version(certs: Certs, authority: Path, host: str) -> str:
    """Connect to a server with its certificate, trusting one authority, and return the version of TLS."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certs.server, certs.server_key)
    client_context = ssl.create_default_context(cafile=str(authority))
    client_socket, server_socket = socket.socketpair()

    def serve() -> None:
        try:
            with server_context.wrap_socket(server_socket, server_side=True) as connection:
                connection.recv(1)
        except OSError:
            server_socket.close()  # the client rejected the certificate

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_context.wrap_socket(client_socket, server_hostname=host) as connection:
            connection.send(b"0")
            return connection.version() or ""
    finally:
        client_socket.close()
        thread.join()


def test_client_accepts_only_the_certificate_of_its_own_server(tmp_path: Path) -> None:
    certs = make_certs(tmp_path / "fleet", ["fleet.example.org", "10.1.2.3"], [])
    for host in ("fleet.example.org", "10.1.2.3", "127.0.0.1", "localhost"):
        assert tls_version(certs, certs.ca, host).startswith("TLS")
    with pytest.raises(ssl.SSLCertVerificationError):
        tls_version(certs, certs.ca, "other.example.org")
    other = make_certs(tmp_path / "other", ["fleet.example.org"], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        tls_version(certs, other.ca, "fleet.example.org")


def test_keys_form_pairs_and_are_private(tmp_path: Path) -> None:
    certs = make_certs(tmp_path, [], ["kitchen", "edge.1"])
    assert certs.names() == ["edge.1", "kitchen"]
    for name in certs.names():
        private = serialization.load_ssh_private_key(certs.node_key(name).read_bytes(), password=None)
        public = serialization.load_ssh_public_key(certs.node_public_key(name).read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.public_key() == public
    for path in (certs.ca_key, certs.server_key, certs.node_key("kitchen")):
        assert path.stat().st_mode & 0o077 == 0


def test_make_certs_keeps_existing_files(tmp_path: Path) -> None:
    certs = make_certs(tmp_path, ["one.example.org"], ["kitchen"])
    before = {path: path.read_bytes() for path in (certs.ca, certs.server, certs.node_key("kitchen"))}
    make_certs(tmp_path, [], ["kitchen", "garden"])
    assert {path: path.read_bytes() for path in before} == before
    assert certs.names() == ["garden", "kitchen"]
    make_certs(tmp_path, ["two.example.org"], [])  # another host needs another certificate of the same authority
    assert certs.ca.read_bytes() == before[certs.ca]
    assert tls_version(certs, certs.ca, "two.example.org").startswith("TLS")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 64])
def test_make_certs_rejects_invalid_client_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a client's name must have"):
        make_certs(tmp_path, [], [name])


def test_check_names_the_missing_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ca\.crt: missing; `vitfleet certs"):
        Certs(tmp_path).check_server()
    make_certs(tmp_path, [], ["kitchen"])
    Certs(tmp_path).check_server()
    Certs(tmp_path).check_client("kitchen")
    with pytest.raises(UserError, match=r"nodes/garden: missing; copy it"):
        Certs(tmp_path).check_client("garden")

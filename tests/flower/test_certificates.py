"""Certificates that OpenSSL believes, keys that Flower reads, secrets that only their owner can read."""

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


def shake_hands(certs: Certs, authority: Path, host: str) -> str:
    """Connect to a server that has the certificate, knowing an authority, and return the version of TLS."""
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(certs.server, certs.server_key)
    outside = ssl.create_default_context(cafile=str(authority))
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with inside.wrap_socket(theirs, server_side=True) as connection:
                connection.recv(1)
        except OSError:
            theirs.close()  # the other end refused

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with outside.wrap_socket(ours, server_hostname=host) as connection:
            connection.send(b"0")
            return connection.version() or ""
    finally:
        ours.close()
        thread.join()


def test_a_device_believes_its_own_server_and_no_other(tmp_path: Path) -> None:
    certs = make_certs(tmp_path / "fleet", ["fleet.example.org", "10.1.2.3"], [])
    for host in ("fleet.example.org", "10.1.2.3", "127.0.0.1", "localhost"):
        assert shake_hands(certs, certs.ca, host).startswith("TLS")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(certs, certs.ca, "other.example.org")
    other = make_certs(tmp_path / "other", ["fleet.example.org"], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(certs, other.ca, "fleet.example.org")


def test_keys_are_a_pair_and_secret(tmp_path: Path) -> None:
    certs = make_certs(tmp_path, [], ["kitchen", "edge.1"])
    assert certs.names() == ["edge.1", "kitchen"]
    for name in certs.names():
        private = serialization.load_ssh_private_key(certs.node_key(name).read_bytes(), password=None)
        public = serialization.load_ssh_public_key(certs.node_public_key(name).read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.public_key() == public
    for path in (certs.ca_key, certs.server_key, certs.node_key("kitchen")):
        assert path.stat().st_mode & 0o077 == 0


def test_made_again_what_is_there_stays(tmp_path: Path) -> None:
    certs = make_certs(tmp_path, ["one.example.org"], ["kitchen"])
    before = {path: path.read_bytes() for path in (certs.ca, certs.server, certs.node_key("kitchen"))}
    make_certs(tmp_path, [], ["kitchen", "garden"])
    assert {path: path.read_bytes() for path in before} == before
    assert certs.names() == ["garden", "kitchen"]
    make_certs(tmp_path, ["two.example.org"], [])  # another host: another certificate, of the same authority
    assert certs.ca.read_bytes() == before[certs.ca]
    assert shake_hands(certs, certs.ca, "two.example.org").startswith("TLS")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 64])
def test_names_that_would_be_paths_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a device's name must be"):
        make_certs(tmp_path, [], [name])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ca\.crt: is not there; `vitfleet certs"):
        Certs(tmp_path).check_server()
    make_certs(tmp_path, [], ["kitchen"])
    Certs(tmp_path).check_server()
    Certs(tmp_path).check_client("kitchen")
    with pytest.raises(UserError, match=r"nodes/garden: is not there; copy it"):
        Certs(tmp_path).check_client("garden")

"""The server that a client joins: its address, and whether the one that answers there is the right one."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from vitfleet.errors import UserError, shown

CONNECT_TIMEOUT_S = 10.0


def parse_address(text: str, default_port: int) -> str:
    """Return ``HOST:PORT`` of the option ``--server``."""
    has_port = ":" in text and not text.endswith("]")
    host, _, port = text.rpartition(":") if has_port else (text, ":", str(default_port))
    in_brackets = host.startswith("[") and host.endswith("]")
    is_port = port.isdecimal() and 0 < int(port) < 2**16
    if not host or "/" in text or not is_port or (":" in host and not in_brackets):
        raise UserError(
            f"--server {text or shown(text)}: must be HOST or HOST:PORT, such as fleet.example.org:{default_port} or "
            f"[::1]:{default_port}"
        )
    return f"{host}:{port}"


def check_server(address: str, ca: Path | None) -> str | None:
    """Check that the server at ``HOST:PORT`` has a certificate of this fleet's authority, or without one no TLS.

    A client that Flower connects to another one gets a traceback, or waits for ever. Where nobody answers, the reason
    is returned: a client waits for its server.
    """
    host, _, port = address.rpartition(":")
    context = _context(ca)
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")),
        ):
            if ca is None:
                raise UserError(
                    f"the server at {address} uses TLS: start this client without --insecure, with --certs DIR"
                )
            return None
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"the server at {address} is not the one that {ca} belongs to ({error.verify_message}); copy ca.crt and "
            "nodes/NAME from the server, and use a host name that its certificate has"
        ) from None
    except ssl.SSLError:  # it speaks no TLS
        return None
    except OSError as error:
        return error.strerror or str(error)


def _context(ca: Path | None) -> ssl.SSLContext:
    if ca is None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    try:
        return ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError:
        raise UserError(
            f"{ca}: is no certificate; copy it from the server, where `vitfleet certs` created it"
        ) from None

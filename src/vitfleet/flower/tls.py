"""A first look at a server's certificate, before Flower connects: Flower answers a wrong one with a traceback."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from vitfleet.errors import UserError

TIMEOUT_S = 10.0


def check_authority(address: str, ca: Path) -> None:
    """Check that a server's certificate is one of this fleet's authority. A server that does not answer is not checked.

    Parameters
    ----------
    address
        ``HOST:PORT``.
    ca
        The certificate of the authority.

    Raises
    ------
    UserError
        The server has another authority's certificate, or one for another host; or the file is no certificate.
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
            socket.create_connection((host.strip("[]"), number), timeout=TIMEOUT_S) as connection,
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

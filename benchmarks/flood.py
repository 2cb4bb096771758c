"""A flood of half-open connections to a server, and how long an honest request takes meanwhile."""

from __future__ import annotations

import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

CONNECTIONS = 200
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303")  # the first bytes of a TLS handshake, and then nothing
PROBE_INTERVAL_S = 0.5
PATH = "/v1/fleet/pull-messages"  # without a signature it is refused, by the SuperLink itself


@contextmanager
def flood(port: int, connections: int = CONNECTIONS) -> Iterator[None]:
    """Hold so many connections open; half of them begin a TLS handshake. Those that are closed are opened again."""
    ended = threading.Event()

    def attack() -> None:
        held: list[socket.socket] = []
        while not ended.wait(0.2):
            held = [connection for connection in held if is_open(connection)]
            while len(held) < connections and not ended.is_set():
                try:
                    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                    if len(held) % 2:
                        connection.sendall(CLIENT_HELLO)
                except OSError:
                    break
                held.append(connection)
        for connection in held:
            connection.close()

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def probed(port: int, ca: Path) -> Iterator[list[float]]:
    """Send a request on a new connection every half second; the list has the seconds that each took."""
    ended, seconds = threading.Event(), list[float]()
    verify = ssl.create_default_context(cafile=str(ca))

    def probe() -> None:
        while not ended.wait(PROBE_INTERVAL_S):
            start = time.monotonic()
            with httpx.Client(verify=verify, trust_env=False, timeout=60) as client:
                client.post(f"https://127.0.0.1:{port}{PATH}")
            seconds.append(time.monotonic() - start)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


def described(seconds: Sequence[float]) -> str:
    if not seconds:
        return "no requests"
    return f"{len(seconds)} requests, median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s"

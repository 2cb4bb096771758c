"""Whoever opens connections and says nothing, or very little, neither delays registered clients nor keeps them out."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from vitfleet.flower.certificates import Certs, make_certs
from vitfleet.flower.server.connections import Connection, ConnectionLimits, ConnectionTable, Peer
from vitfleet.flower.server.proxy import MAX_HEADER_BYTES, http_protocol, make_proxy, raise_file_limit, serve

POLL = "/v1/fleet/pull-messages"


class Connections:
    """A table with a clock that is set by hand; ``closed`` has the peers whose connections were closed."""

    def __init__(self, total: int) -> None:
        self.now = 0.0
        self.closed: list[Peer] = []
        limits = ConnectionLimits(total, handshake_s=10, waiting_s=15, request_s=120)
        self.table = ConnectionTable(limits, clock=lambda: self.now)

    def add(self, host: str, port: int) -> Connection | None:
        return self.table.add((host, port), lambda: self.closed.append((host, port)), lambda: False)

    def open(self, host: str, port: int, known: bool = False) -> Connection:
        connection = self.add(host, port)
        assert connection is not None
        self.table.opened(connection, connection.close)
        if known:
            self.table.begin_request(connection)
            self.table.end_request(connection, accepted=True)
        return connection


def test_every_phase_has_its_time_limit() -> None:
    some = Connections(10)
    some.add("a", 1)
    some.open("a", 2)
    some.table.begin_request(some.open("a", 3))
    for now, closed in ((10, []), (10.1, [1]), (15, [1]), (15.1, [1, 2]), (120, [1, 2]), (120.1, [1, 2, 3])):
        some.now = now
        some.table.sweep()
        assert [port for _, port in some.closed] == closed
    assert len(some.table) == 0


def test_a_full_table_gives_up_the_oldest_stranger_of_the_address_with_most_of_them() -> None:
    some = Connections(5)
    some.open("client", 1, known=True)
    some.open("newcomer", 1)
    for port in (1, 2, 3):
        some.now = port
        some.add("flood", port)
    some.now = 4
    assert some.add("flood", 4)
    assert some.closed == [("flood", 1)]
    assert some.add("client", 2)
    assert some.closed == [("flood", 1), ("flood", 2)]


def test_clients_in_the_middle_of_a_request_are_never_given_up() -> None:
    some = Connections(2)
    first, _ = (some.open("client", port, known=True) for port in (1, 2))
    some.table.begin_request(first)
    new = some.open("new", 1, known=True)
    assert some.closed == [("client", 2)]
    some.table.begin_request(new)
    assert not some.add("another", 1)


def test_a_connection_from_the_port_of_one_that_is_ending_has_its_own_limits() -> None:
    some = Connections(10)
    ending = some.open("a", 1)
    some.add("a", 1)
    some.table.end_request(ending, accepted=True)
    some.table.remove(ending)
    assert len(some.table) == 1
    some.now = 10.1
    some.table.sweep()
    assert some.closed == [("a", 1)]


def test_connections_that_ended_are_forgotten() -> None:
    some = Connections(3)
    some.table.add(("a", 1), lambda: None, lambda: True)
    some.table.sweep()
    assert len(some.table) == 0


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("certs") / "fleet", [], ["kitchen"])


@asynccontextmanager
async def running_proxy(table: ConnectionTable, certs: Certs) -> AsyncIterator[tuple[int, list[str]]]:
    """Run a proxy with TLS in front of a SuperLink that accepts everything; yield its port and the paths asked for."""
    paths: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        await request.aread()
        paths.append(request.url.path)

        async def content() -> AsyncIterator[bytes]:
            yield b"messages"

        return httpx.Response(200, content=content())

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certs.server, certs.server_key)
    superlink = httpx.AsyncClient(base_url="https://superlink", transport=httpx.MockTransport(answer))
    with socket.create_server(("127.0.0.1", 0), backlog=500) as listener:
        task = asyncio.create_task(serve(listener, http_protocol(make_proxy(superlink, table)), table, context))
        try:
            yield listener.getsockname()[1], paths
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def poll(port: int, ca: Path, path: str = POLL, body: bytes = b"x") -> httpx.Response:
    verify = ssl.create_default_context(cafile=str(ca))
    async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=30) as client:
        return await client.post(f"https://127.0.0.1:{port}{path}", content=body)


def with_proxy(
    limits: ConnectionLimits, certs: Certs, block: Callable[[int, list[str], ConnectionTable], Awaitable[None]]
) -> None:
    async def run() -> None:
        table = ConnectionTable(limits)
        async with running_proxy(table, certs) as (port, paths):
            await block(port, paths, table)

    asyncio.run(run())


async def connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


def test_clients_are_served_during_a_flood_of_half_open_connections(certs: Certs) -> None:
    async def flood(port: int, paths: list[str], table: ConnectionTable) -> None:
        connections = [await connect(port) for _ in range(200)]
        for _ in range(3):
            assert (await poll(port, certs.ca)).content == b"messages"
        assert paths == [POLL] * 3
        assert len(table) <= 50
        for connection in connections:
            connection.close()

    with_proxy(ConnectionLimits(total=50), certs, flood)


def test_slow_and_silent_connections_are_closed(certs: Certs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitfleet.flower.server.proxy.SWEEP_INTERVAL_S", 0.05)

    async def slowloris(port: int, paths: list[str], table: ConnectionTable) -> None:
        silent = await connect(port)
        verify = ssl.create_default_context(cafile=str(certs.ca))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=verify)
        for line in (f"POST {POLL} HTTP/1.1\r\n", "host: a\r\n", "x-slow: 1\r\n"):
            writer.write(line.encode())
            await writer.drain()
            await asyncio.sleep(0.05)
        assert await asyncio.wait_for(reader.read(), 20) == b""  # it ends without a request
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(silent, 1), 20) == b""
        assert not paths
        silent.close()

    with_proxy(ConnectionLimits(handshake_s=0.2, waiting_s=0.3), certs, slowloris)


def test_memory_of_closed_connections_is_freed(certs: Certs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed TLS connections are reference cycles of few objects with large buffers: Python is slow to free them."""
    monkeypatch.setattr("vitfleet.flower.server.proxy.SWEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr("vitfleet.flower.server.proxy.COLLECT_INTERVAL_S", 0.0)

    def tls_objects() -> int:
        return sum(type(thing) is ssl.SSLObject for thing in gc.get_objects())

    async def come_and_go(port: int, paths: list[str], table: ConnectionTable) -> None:
        before = tls_objects()
        for _ in range(5):
            await poll(port, certs.ca)
        for _ in range(100):
            await asyncio.sleep(0.05)
            if tls_objects() <= before:
                return
        raise AssertionError(f"{tls_objects()} TLS objects are left, {before} before")

    gc.collect()
    gc.disable()  # only the proxy's own collections count
    try:
        with_proxy(ConnectionLimits(), certs, come_and_go)
    finally:
        gc.enable()


@pytest.mark.parametrize(("end", "status"), [("", b"400"), ("\r\ncontent-length: 0\r\n\r\n", b"431")])
def test_headers_are_limited(end: str, status: bytes, certs: Certs) -> None:
    """Those that never end, and those that arrive at once."""

    async def long_header(port: int, paths: list[str], table: ConnectionTable) -> None:
        verify = ssl.create_default_context(cafile=str(certs.ca))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=verify)
        writer.write(f"POST {POLL} HTTP/1.1\r\nhost: a\r\nx-long: {'a' * (MAX_HEADER_BYTES + 1)}{end}".encode())
        assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == status
        assert not paths
        writer.close()

    with_proxy(ConnectionLimits(), certs, long_header)


def test_no_more_connections_than_this_process_can_have_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 300), before[1]))
    try:
        limits = raise_file_limit(ConnectionLimits())
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert 2 * limits.total < files
        assert limits.total == 1000 or files == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_port_that_is_used_again_at_once_is_no_way_around_the_limits(
    certs: Certs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitfleet.flower.server.proxy.SWEEP_INTERVAL_S", 0.05)

    async def reset_and_return(port: int) -> socket.socket:
        """Connect twice from one port: the proxy hears of the first one's end and of the second at the same time."""
        first, second = socket.socket(), socket.socket()
        for client in (first, second):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        first.connect(("127.0.0.1", port))
        await asyncio.sleep(0.02)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset instead of an end
        second.bind(first.getsockname())  # before the port is free: another process could take it
        first.close()
        second.connect(("127.0.0.1", port))
        second.setblocking(False)
        return second

    async def attack(port: int, paths: list[str], table: ConnectionTable) -> None:
        for _ in range(2):
            connection = await reset_and_return(port)
            await asyncio.sleep(0.02)
            assert len(table) >= 1
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), 20) == b""
            connection.close()

    # Long enough that a slow machine does not close a connection before it is counted.
    with_proxy(ConnectionLimits(handshake_s=2), certs, attack)


def test_without_a_free_file_a_silent_connection_gives_way(certs: Certs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is not full: other things may have taken the files."""
    monkeypatch.setattr("vitfleet.flower.server.proxy.SWEEP_INTERVAL_S", 0.05)

    async def run_out(port: int, paths: list[str], table: ConnectionTable) -> None:
        silent = await connect(port)
        loop = asyncio.get_running_loop()
        while not len(table):
            await asyncio.sleep(0.01)
        accept = loop.sock_accept
        failed: list[socket.socket] = []

        async def no_file_left(listener: socket.socket) -> tuple[socket.socket, object]:
            if not failed:
                failed.append(listener)
                raise OSError(errno.EMFILE, "Too many open files")
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", no_file_left)
        assert (await poll(port, certs.ca)).content == b"messages"  # ends the accept that had begun before
        assert await asyncio.wait_for(loop.sock_recv(silent, 1), 20) == b""
        silent.close()

    with_proxy(ConnectionLimits(handshake_s=60), certs, run_out)

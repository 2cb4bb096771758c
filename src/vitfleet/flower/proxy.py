"""Reverse proxy that passes clients' requests to the SuperLink, and nothing else.

A SuperLink serves clients, the command ``flwr`` and its own helper processes on one port, and authenticates only
clients: anyone who reached the port could start a run, and thereby code on every client. So the SuperLink listens on
this machine's loopback only. The proxy listens outside, forwards ``/v1/fleet/…``, whose requests clients sign, and
limits their size. It also limits connections, their headers and their patience (``connections.py``): whoever opens
connections and says nothing, or very little, does not keep clients out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeAlias

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vitfleet.flower.connections import ConnectionLimits, ConnectionTable, Peer

ALLOWED_PREFIX = "/v1/fleet/"
MAX_REQUEST_BYTES = 16 * 2**20  # Flower sends arrays in pieces of 5 MiB, vitfleet's chunks are smaller
MAX_HEADER_BYTES = 16 * 2**10
SUPERLINK_TIMEOUT = httpx.Timeout(60.0)
# A request that arrives slowly must not take the place of another one: the proxy's own connections are limited.
SUPERLINK_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
SWEEP_INTERVAL_S = 1.0
COLLECT_INTERVAL_S = 60.0
FILES_WANTED = 4096  # open at a time; a connection takes two: the client's and the one to the SuperLink
FILES_RESERVED = 64
BACKLOG = 1024
# Headers of one connection, which must not be forwarded.
HOP_BY_HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})


class RequestTooLargeError(Exception):
    """A request exceeds ``MAX_REQUEST_BYTES``."""


MakeProtocol: TypeAlias = Callable[[], asyncio.Protocol]


def make_proxy(superlink: httpx.AsyncClient, table: ConnectionTable) -> Starlette:
    """Return the proxy in front of a SuperLink. It notes in the table which connections have requests."""

    async def forward(request: Request) -> Response:
        peer = _peer(request)
        table.begin_request(peer)
        path = request.url.path
        if not path.startswith(ALLOWED_PREFIX) or ".." in path:
            return _refuse("not found", 404, table, peer)
        # h11 limits headers that arrive in parts only: what arrives at once may be as long as what is read at a time.
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
            return _refuse("headers too large", 431, table, peer)
        headers = [header for header in request.headers.items() if header[0] not in HOP_BY_HOP_HEADERS]
        forwarded = superlink.build_request("POST", path, headers=headers, content=_limited_body(request))
        try:
            reply = await superlink.send(forwarded, stream=True)
        except RequestTooLargeError:
            return _refuse("request too large", 413, table, peer)
        except httpx.TransportError:
            return _refuse("the SuperLink does not answer", 503, table, peer)
        reply_headers = {name: value for name, value in reply.headers.items() if name not in HOP_BY_HOP_HEADERS}

        async def end() -> None:
            table.end_request(peer, accepted=reply.is_success)
            await reply.aclose()

        return StreamingResponse(reply.aiter_raw(), reply.status_code, reply_headers, background=BackgroundTask(end))

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


def _peer(request: Request) -> Peer:
    return ("", 0) if request.client is None else (request.client.host, request.client.port)


def _refuse(reason: str, status: int, table: ConnectionTable, peer: Peer) -> Response:
    table.end_request(peer, accepted=False)
    return PlainTextResponse(f"{reason}\n", status_code=status)


async def _limited_body(request: Request) -> AsyncIterator[bytes]:
    size = 0
    async for data in request.stream():
        size += len(data)
        if size > MAX_REQUEST_BYTES:
            raise RequestTooLargeError
        yield data


def http_protocol(app: Starlette) -> MakeProtocol:
    """Return what makes the HTTP side of a connection."""
    config = uvicorn.Config(
        app,
        http="h11",  # the one whose headers are limited
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        proxy_headers=False,  # whoever connects could claim another address
        log_level="warning",
    )
    config.load()
    server = uvicorn.Server(config)

    def make() -> asyncio.Protocol:
        protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=server.server_state, app_state={}
        )
        return protocol

    return make


async def serve(
    listener: socket.socket, make_protocol: MakeProtocol, table: ConnectionTable, context: ssl.SSLContext | None
) -> NoReturn:
    """Accept connections for ever, within the limits of the table."""
    loop = asyncio.get_running_loop()
    sweeper = loop.create_task(_sweep(table))
    handshakes: set[asyncio.Task[None]] = set()
    listener.setblocking(False)
    try:
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError:  # no file is left for it
                table.make_room()
                await asyncio.sleep(SWEEP_INTERVAL_S / 10)
                continue
            peer = (str(address[0]), int(address[1]))
            task = loop.create_task(_open(accepted, peer, make_protocol, table, context))
            task.add_done_callback(partial(_end_handshake, accepted, handshakes))
            handshakes.add(task)
            if not table.add(peer, task.cancel, task.done):
                task.cancel()
    finally:
        sweeper.cancel()
        for task in handshakes:
            task.cancel()


async def _open(
    accepted: socket.socket,
    peer: Peer,
    make_protocol: MakeProtocol,
    table: ConnectionTable,
    context: ssl.SSLContext | None,
) -> None:
    """Do the TLS handshake of a connection and hand it over to HTTP."""
    try:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(make_protocol, accepted, ssl=context)
    except OSError:  # the other side ended, or it does not speak TLS
        table.remove(peer)
        accepted.close()
        return
    table.opened(peer, transport.abort, transport.is_closing)


def _end_handshake(accepted: socket.socket, handshakes: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    handshakes.discard(task)
    if task.cancelled():  # perhaps before it began
        accepted.close()


async def _sweep(table: ConnectionTable) -> NoReturn:
    """Close silent connections, and free the memory of closed ones.

    A closed TLS connection of asyncio is a reference cycle with large buffers of OpenSSL. Python's garbage collector
    counts objects, not their bytes: by itself it would keep hundreds of such connections.
    """
    collected_at = time.monotonic()
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        table.sweep()
        if time.monotonic() - collected_at >= COLLECT_INTERVAL_S:
            gc.collect()
            collected_at = time.monotonic()


def raise_file_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """Ask for enough open files; return the limits with as many connections as this process can have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = FILES_WANTED if soft == resource.RLIM_INFINITY else soft
    return replace(limits, total=max(1, min(limits.total, (files - FILES_RESERVED) // 2)))


async def _run(arguments: argparse.Namespace) -> None:
    verify = ssl.create_default_context(cafile=arguments.ca) if arguments.ca else True
    url = f"{'https' if arguments.ca else 'http'}://127.0.0.1:{arguments.superlink_port}"
    context = None
    if arguments.cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(arguments.cert, arguments.key)
    table = ConnectionTable(raise_file_limit(ConnectionLimits()))
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    listener = socket.create_server((arguments.host, arguments.port), family=family, backlog=BACKLOG)
    async with httpx.AsyncClient(
        base_url=url, verify=verify, timeout=SUPERLINK_TIMEOUT, limits=SUPERLINK_LIMITS, trust_env=False
    ) as superlink:
        gc.freeze()  # what is there before the first connection stays: collections need not visit it
        await serve(listener, http_protocol(make_proxy(superlink, table)), table, context)


def main() -> None:
    """Run the proxy. `vitfleet server` starts it beside the SuperLink."""
    parser = argparse.ArgumentParser(description="Forward clients' requests to a SuperLink on this machine.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--superlink-port", required=True, metavar="PORT", help="the SuperLink's port on this machine")
    parser.add_argument("--ca")
    parser.add_argument("--cert")
    parser.add_argument("--key")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()

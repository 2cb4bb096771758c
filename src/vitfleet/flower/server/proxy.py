"""Reverse proxy that passes clients' requests to the SuperLink, and nothing else.

A SuperLink serves clients, the command ``flwr`` and its own helper processes on one port, and authenticates only
clients: anyone who reached the port could start a run, and thereby code on every client. So the SuperLink listens on
this machine's loopback only. The proxy listens outside, forwards ``/v1/fleet/…``, whose requests clients sign, limits
their size, and refuses messages that are not replies of the client that sends them (:func:`has_own_replies_only`). It
also limits connections, their headers and their patience (``connections``): whoever opens connections and says nothing,
or very little, does not keep clients out. No request is logged, and `vitfleet server` limits its log: nobody can fill
the disk with it.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import re
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
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vitfleet.flower.server.connections import Connection, ConnectionLimits, ConnectionTable

ALLOWED_PATH = re.compile(r"/v1/fleet/[A-Za-z0-9_/-]+")
PUSH_MESSAGES = "/v1/fleet/push-messages"
MAX_PUSH_BYTES = 2**20  # it names a reply's objects, about 70 bytes for each MiB; the objects follow in other requests
# The largest has a chunk of a message, 1 MiB. The SuperLink has all of it in memory before it sees who signed it.
MAX_REQUEST_BYTES = 2 * 2**20
MAX_HEADER_BYTES = 16 * 2**10
SUPERLINK_TIMEOUT = httpx.Timeout(60.0)
# A request that arrives slowly must not take the place of another one: the proxy's own connections are limited.
SUPERLINK_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
SWEEP_INTERVAL_S = 1.0
COLLECT_INTERVAL_S = 60.0
FILES_WANTED = 4096  # open at a time; a connection takes two: the client's and the one to the SuperLink
FILES_RESERVED = 64
BACKLOG = 1024
NO_FILE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Headers of one connection, which must not be forwarded.
HOP_BY_HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})


class RefusedRequestError(Exception):
    """A request that is not forwarded."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


MakeProtocol: TypeAlias = Callable[[Connection], asyncio.Protocol]


def make_proxy(superlink: httpx.AsyncClient, table: ConnectionTable) -> Starlette:
    """Return the proxy in front of a SuperLink. It notes in the table which connections have requests."""

    async def forward(request: Request) -> Response:
        connection: Connection = request.state.connection

        def refuse(reason: str, status: int) -> Response:
            table.end_request(connection, accepted=False)
            return PlainTextResponse(f"{reason}\n", status_code=status)

        table.begin_request(connection)
        try:
            reply = await superlink.send(await _forwarded(request, superlink), stream=True)
        except RefusedRequestError as error:
            return refuse(str(error), error.status)
        except httpx.TransportError:
            return refuse("the SuperLink does not answer", 503)
        except (ClientDisconnect, httpx.InvalidURL, ValueError):  # it ended too early, or it cannot be forwarded
            return refuse("bad request", 400)
        reply_headers = {name: value for name, value in reply.headers.items() if name not in HOP_BY_HOP_HEADERS}

        async def end() -> None:
            table.end_request(connection, accepted=reply.is_success)
            await reply.aclose()

        return StreamingResponse(reply.aiter_raw(), reply.status_code, reply_headers, background=BackgroundTask(end))

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


async def _forwarded(request: Request, superlink: httpx.AsyncClient) -> httpx.Request:
    """Return the request to the SuperLink."""
    path = request.scope["path"]  # not that of `request.url`, which is made with the header `host`
    if not ALLOWED_PATH.fullmatch(path):
        raise RefusedRequestError("not found", 404)
    # h11 limits headers that arrive in parts only: what arrives at once may be as long as what is read at a time.
    if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
        raise RefusedRequestError("headers too large", 431)
    headers = [header for header in request.headers.items() if header[0] not in HOP_BY_HOP_HEADERS]
    if path != PUSH_MESSAGES:
        content = _limited_body(request, MAX_REQUEST_BYTES)
        return superlink.build_request("POST", path, headers=headers, content=content)
    body = b"".join([data async for data in _limited_body(request, MAX_PUSH_BYTES)])
    if not has_own_replies_only(body):
        raise RefusedRequestError("not a reply of the node that sends it", 403)
    return superlink.build_request("POST", path, headers=headers, content=body)


async def _limited_body(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    async for data in request.stream():
        size += len(data)
        if size > max_bytes:
            raise RefusedRequestError("request too large", 413)
        yield data


def has_own_replies_only(body: bytes) -> bool:
    """Whether the body of a request to push messages has replies of the node that signs it, and nothing else.

    Flower's SuperLink verifies that the signature of a request is that of its ``node``. It does not verify that the
    messages inside are from that node, nor that they reply to anything. A client could send messages in the server's
    name, and to the server: Flower hands them over together with another client's reply, which is lost if they cannot
    be read.
    """
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    metadata = [message.metadata for message in request.messages_list]
    return bool(metadata) and all(
        entry.src_node_id == request.node.node_id and entry.reply_to_message_id for entry in metadata
    )


def http_protocol(app: Starlette) -> MakeProtocol:
    """Return a function that makes the HTTP protocol of a connection."""
    config = uvicorn.Config(
        app,
        http="h11",  # the one whose headers are limited
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        proxy_headers=False,  # whoever connects could claim another address
        log_config=None,
        log_level="error",  # a warning is logged for each invalid request
    )
    config.load()
    server = uvicorn.Server(config)

    def make(connection: Connection) -> asyncio.Protocol:
        protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=server.server_state, app_state={"connection": connection}
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
            except OSError as error:
                if error.errno in NO_FILE_LEFT:
                    table.sweep()
                    table.evict()
                await asyncio.sleep(SWEEP_INTERVAL_S / 10)
                continue
            peer = (str(address[0]), int(address[1]))
            connection = table.add(peer, accepted.close, partial(_is_closed, accepted))
            if connection is None:
                accepted.close()
                continue
            task = loop.create_task(_open(accepted, connection, make_protocol, table, context))
            task.add_done_callback(partial(_end_handshake, accepted, handshakes))
            handshakes.add(task)
            connection.close = task.cancel
    finally:
        sweeper.cancel()
        for task in handshakes:
            task.cancel()


def _is_closed(accepted: socket.socket) -> bool:
    """Whether a socket is closed; one whose transport is closing still waits for the other side."""
    return accepted.fileno() < 0


async def _open(
    accepted: socket.socket,
    connection: Connection,
    make_protocol: MakeProtocol,
    table: ConnectionTable,
    context: ssl.SSLContext | None,
) -> None:
    """Do the TLS handshake of a connection and hand it over to HTTP."""
    try:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            partial(make_protocol, connection), accepted, ssl=context
        )
    except OSError:  # the other side ended, or it does not speak TLS
        table.remove(connection)
        accepted.close()
        return
    table.opened(connection, transport.abort)


def _end_handshake(accepted: socket.socket, handshakes: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    handshakes.discard(task)
    if task.cancelled() or task.exception() is not None:  # perhaps cancelled before it began
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

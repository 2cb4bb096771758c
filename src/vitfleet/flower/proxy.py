"""Reverse proxy that passes clients' requests to the SuperLink, and nothing else.

A SuperLink serves clients, the command ``flwr`` and its own helper processes on one port, and authenticates only
clients: anyone who reached the port could start a run, and thereby code on every client. So the SuperLink listens on
this machine's loopback only. The proxy listens outside, forwards ``/v1/fleet/…``, whose requests clients sign, and
limits their size.
"""

from __future__ import annotations

import argparse
import ssl
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

ALLOWED_PREFIX = "/v1/fleet/"
MAX_REQUEST_BYTES = 16 * 2**20  # Flower sends arrays in pieces of 5 MiB, vitfleet's chunks are smaller
SUPERLINK_TIMEOUT = httpx.Timeout(60.0)
# Headers of one connection, which must not be forwarded.
HOP_BY_HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})


class RequestTooLargeError(Exception):
    """A request exceeds ``MAX_REQUEST_BYTES``."""


def make_proxy(superlink: httpx.AsyncClient) -> Starlette:
    """Return the proxy in front of a SuperLink."""

    async def forward(request: Request) -> Response:
        path = request.url.path
        if not path.startswith(ALLOWED_PREFIX) or ".." in path:
            return PlainTextResponse("not found\n", status_code=404)
        headers = [header for header in request.headers.items() if header[0] not in HOP_BY_HOP_HEADERS]
        forwarded = superlink.build_request("POST", path, headers=headers, content=_limited_body(request))
        try:
            reply = await superlink.send(forwarded, stream=True)
        except RequestTooLargeError:
            return PlainTextResponse("request too large\n", status_code=413)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink does not answer\n", status_code=503)
        reply_headers = {name: value for name, value in reply.headers.items() if name not in HOP_BY_HOP_HEADERS}
        close = BackgroundTask(reply.aclose)
        return StreamingResponse(reply.aiter_raw(), reply.status_code, reply_headers, background=close)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


async def _limited_body(request: Request) -> AsyncIterator[bytes]:
    size = 0
    async for data in request.stream():
        size += len(data)
        if size > MAX_REQUEST_BYTES:
            raise RequestTooLargeError
        yield data


def main() -> None:
    """Run the proxy. `vitfleet server` starts it beside the SuperLink."""
    parser = argparse.ArgumentParser(description="Forward clients' requests to a SuperLink on this machine.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--superlink-port", required=True, metavar="PORT", help="the SuperLink's port on this machine")
    parser.add_argument("--ca")
    parser.add_argument("--cert")
    parser.add_argument("--key")
    arguments = parser.parse_args()
    verify = ssl.create_default_context(cafile=arguments.ca) if arguments.ca else True
    url = f"{'https' if arguments.ca else 'http'}://127.0.0.1:{arguments.superlink_port}"
    superlink = httpx.AsyncClient(base_url=url, verify=verify, timeout=SUPERLINK_TIMEOUT, trust_env=False)
    uvicorn.run(
        make_proxy(superlink),
        host=arguments.host,
        port=arguments.port,
        ssl_certfile=arguments.cert,
        ssl_keyfile=arguments.key,
        log_level="warning",
    )


if __name__ == "__main__":
    main()

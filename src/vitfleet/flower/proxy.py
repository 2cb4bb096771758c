"""The fleet's door: lets devices' requests through to the SuperLink, and nothing else.

A SuperLink serves devices, the command ``flwr`` and its own helpers on one port, and asks only devices who they are:
whoever reaches the port could start a run, and with it code on every device. So the SuperLink listens on this machine
alone, and this door stands outside: it passes ``/v1/fleet/…`` on, whose requests devices sign, and limits their size.
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

PATHS = "/v1/fleet/"
LARGEST_REQUEST = 16 * 2**20  # Flower sends arrays in pieces of 5 MiB, ours are smaller
PATIENCE = httpx.Timeout(60.0)
# They belong to one connection, not to what is passed on.
OF_THE_CONNECTION = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})


class TooLargeError(Exception):
    """A request has more bytes than any honest one."""


def make_proxy(link: httpx.AsyncClient) -> Starlette:
    """Return the door before a SuperLink."""

    async def handle(request: Request) -> Response:
        path = request.url.path
        if not path.startswith(PATHS) or ".." in path:
            return PlainTextResponse("not here\n", status_code=404)
        headers = [pair for pair in request.headers.items() if pair[0] not in OF_THE_CONNECTION]
        passed = link.build_request("POST", path, headers=headers, content=_limited(request))
        try:
            answer = await link.send(passed, stream=True)
        except TooLargeError:
            return PlainTextResponse("too large\n", status_code=413)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink does not answer\n", status_code=503)
        kept = {name: value for name, value in answer.headers.items() if name not in OF_THE_CONNECTION}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    return Starlette(routes=[Route("/{path:path}", handle, methods=["POST"])])


async def _limited(request: Request) -> AsyncIterator[bytes]:
    total = 0
    async for piece in request.stream():
        total += len(piece)
        if total > LARGEST_REQUEST:
            raise TooLargeError
        yield piece


def main() -> None:
    """Open the door: what `vitfleet server` starts beside the SuperLink."""
    parser = argparse.ArgumentParser(description="Pass devices' requests on to a SuperLink on this machine.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--link", required=True, metavar="PORT", help="the SuperLink's port on this machine")
    parser.add_argument("--ca")
    parser.add_argument("--cert")
    parser.add_argument("--key")
    given = parser.parse_args()
    trusted = ssl.create_default_context(cafile=given.ca) if given.ca else True
    address = f"{'https' if given.ca else 'http'}://127.0.0.1:{given.link}"
    link = httpx.AsyncClient(base_url=address, verify=trusted, timeout=PATIENCE, trust_env=False)
    uvicorn.run(
        make_proxy(link),
        host=given.host,
        port=given.port,
        ssl_certfile=given.cert,
        ssl_keyfile=given.key,
        log_level="warning",
    )


if __name__ == "__main__":
    main()

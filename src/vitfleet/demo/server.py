"""The demo's web server, on the standard library: one page, and predictions of the images that it sends."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address

from vitfleet.demo.predictions import predict_views
from vitfleet.errors import UserError
from vitfleet.inference.classifier import Classifier

MAX_BYTES = 32 * 2**20  # of an image
LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}


class DemoServer(ThreadingHTTPServer):
    """Serves the page and predicts images, one at a time. Port 0: any free one."""

    daemon_threads = True

    def __init__(self, host: str, port: int, title: str, models: Mapping[str, Classifier]) -> None:
        self.title = title
        self.models = models
        self.is_local = _is_loopback(host)
        self.predicting = threading.Lock()  # hooks that collect attention are not for several threads
        try:
            super().__init__((host, port), DemoHandler)
        except OSError as error:
            raise UserError(f"--host {host} --port {port}: cannot listen there ({error.strerror})") from None

    @property
    def address(self) -> str:
        """The page's address."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class DemoHandler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: DemoServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send the page, or what it is about."""
        if not self._is_allowed():
            return
        if self.path == "/":
            self._send(
                HTTPStatus.OK, "text/html; charset=utf-8", files("vitfleet.demo").joinpath("page.html").read_bytes()
            )
        elif self.path == "/about":
            titles, (model, *_) = list(self.server.models), self.server.models.values()
            about = {"title": self.server.title, "models": titles, "classes": list(model.classes)}
            self._send_json(HTTPStatus.OK, about)
        elif self.path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, "image/x-icon", b"")
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "no such page"})

    def do_POST(self) -> None:
        """Predict the image in the request's body."""
        if not self._is_allowed():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/predict" or not length.isdigit():
            self.close_connection = True  # the body was not read
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "send an image to /predict"})
        elif int(length) > MAX_BYTES:
            self.close_connection = True
            self._send_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": "the image is larger than 32 MiB"})
        else:
            data = self.rfile.read(int(length))
            try:
                with self.server.predicting:
                    views = predict_views(self.server.models, data)
            except UserError as error:
                self._send_json(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
                return
            self._send_json(HTTPStatus.OK, views)

    def _is_allowed(self) -> bool:
        """Refuse requests under another host's name: a page elsewhere could make a browser send them here."""
        name = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        if self.server.is_local and name not in LOCAL_NAMES and not _is_loopback(name):
            self.close_connection = True
            self._send_json(HTTPStatus.FORBIDDEN, {"error": "this page is for this machine only"})
            return False
        return True

    def _send_json(self, status: HTTPStatus, tree: object) -> None:
        self._send(status, "application/json", json.dumps(tree).encode())

    def _send(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: the page shows what happens."""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in LOCAL_NAMES

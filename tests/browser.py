"""Headless Chromium, controlled over its debugging pipe: needs the program but no Python package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page in one browser. Errors and warnings of the page are collected in ``errors``."""

    def __init__(self, send: int, receive: int) -> None:
        self.errors: list[str] = []
        self._send = send
        self._receive = os.fdopen(receive, "rb", buffering=0)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read_message()
            if reply.get("id") == self._last_id:
                assert "error" not in reply, reply["error"]
                result: dict[str, Any] = reply["result"]
                return result
            self._handle_event(reply)

    def open(self, page: Path | str, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file or an address in a window of this size and wait until its figures are drawn."""
        mobile = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not self._loaded:
            assert time.monotonic() < deadline, "the page did not load in 60 s"
            self._handle_event(self._read_message())
        # Figures are drawn after the layout: two frames later all are complete.
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        self.call("Runtime.evaluate", expression=frames, awaitPromise=True)

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def drop_file(self, selector: str, file: Path) -> None:
        """Drag a file over an element and drop it there, as a user does from a file manager."""
        box = self.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                         f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())")  # fmt: skip
        data = {"items": [], "files": [str(file.resolve())], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=box[0], y=box[1], data=data)

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {expression}"
            time.sleep(0.05)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Save an image of the whole page, or of the visible part."""
        reply = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(reply["data"]))

    def print_pdf(self, path: Path) -> None:
        """Save the page as it is printed on A4 paper."""
        reply = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        path.write_bytes(base64.b64decode(reply["data"]))

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = self._receive.read(1 << 16)
            assert chunk, "the browser has exited"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _handle_event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.errors.append(params["entry"]["text"])


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile and without network access."""
    assert CHROMIUM is not None
    browser_in, our_out = os.pipe()
    our_in, browser_out = os.pipe()
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--proxy-server=127.0.0.1:9",  # external resources fail to load, which is an error of the page
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",
    ]

    # The protocol uses file descriptors 3 (to the browser) and 4 (from it): a shell assigns them.
    shell = ["bash", "-c", f'exec "$@" 3<&{browser_in} 4>&{browser_out}', "bash"]
    process = subprocess.Popen(
        [*shell, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(browser_in, browser_out)
    )
    os.close(browser_in)
    os.close(browser_out)
    browser = None
    try:
        browser = Browser(our_out, our_in)
        yield browser
    finally:
        process.terminate()
        process.wait(30)
        os.close(our_out)
        if browser is not None:
            browser._receive.close()

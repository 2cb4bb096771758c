"""A real Chromium without a window, driven over its debugging pipe: needs the program, no package."""

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
    """One page in one browser. What it complains of is collected in ``complaints``."""

    def __init__(self, send: int, receive: int) -> None:
        self.complaints: list[str] = []
        self._send = send
        self._receive = os.fdopen(receive, "rb", buffering=0)
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file as a window of this size would show it, and let its figures be drawn."""
        mobile = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not self._loaded:
            assert time.monotonic() < deadline, "the page does not load"
            self._hear(self._next())
        # Figures are drawn when they are laid out: two frames later all are.
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        self.call("Runtime.evaluate", expression=frames, awaitPromise=True)

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Save what the page looks like, whole or the window's part of it."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = self._receive.read(1 << 16)
            assert chunk, "the browser has gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _hear(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(params["entry"]["text"])


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile, cut off from every network."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--proxy-server=127.0.0.1:9",  # whatever the page would load from elsewhere fails, and is heard of
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",
    ]

    # The protocol's pipes are 3, to the browser, and 4, from it: a shell puts them there.
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
    process = subprocess.Popen(
        [*shell, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(theirs_in, theirs_out)
    )
    os.close(theirs_in)
    os.close(theirs_out)
    browser = None
    try:
        browser = Browser(ours_out, ours_in)
        yield browser
    finally:
        process.terminate()
        process.wait(30)
        os.close(ours_out)
        if browser is not None:
            browser._receive.close()

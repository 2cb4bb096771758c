"""The check of dependencies against published advisories: found ones fail, an unreachable source does not."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_advisories.py"
AFFECTED = {"torch": ["GHSA-1", "PYSEC-2"]}


class Advisories(BaseHTTPRequestHandler):
    """Answers as the source of advisories does."""

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        names = [query["package"]["name"] for query in queries]
        assert all("+" not in query["version"] for query in queries)
        results = [{"vulns": [{"id": name} for name in AFFECTED[name]]} if name in AFFECTED else {} for name in names]
        body = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_advisories", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Advisories) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_everything_that_is_required_is_checked(script: ModuleType) -> None:
    versions = script.installed_versions()
    assert {"torch", "numpy", "pydantic", "flwr", "pydantic-core"} <= set(versions)
    assert "vitfleet" not in versions


def test_an_advisory_fails_and_is_named(
    script: ModuleType, source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "SOURCE", source)
    monkeypatch.setattr(script, "installed_versions", lambda: {"torch": "2.6.0+cpu", "numpy": "2.0.0"})
    assert script.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "torch 2.6.0+cpu: GHSA-1, PYSEC-2",
        "advisories: 2 packages checked, 1 have some",
    ]
    monkeypatch.setattr(script, "installed_versions", lambda: {"numpy": "2.0.0"})
    assert script.main() == 0


def test_without_a_network_it_says_so_and_does_not_fail(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "SOURCE", "http://127.0.0.1:1/")
    assert script.main() == 0
    assert "not checked" in capsys.readouterr().out

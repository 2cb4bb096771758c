"""A server whose port is taken does not start, and one whose processes end does not go on without them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vitfleet.errors import UserError
from vitfleet.flower.server import processes
from vitfleet.flower.server.processes import ServerSettings, running_server


def test_a_port_in_use_is_refused_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_running", lambda *_: pytest.fail("a process is started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ServerSettings("127.0.0.1", port, tmp_path, None)
        with pytest.raises(UserError, match=f"port {port} is in use"), running_server(settings, []):
            pytest.fail("it goes on")


def test_a_server_whose_proxy_has_ended_does_not_go_on(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    settings = ServerSettings("127.0.0.1", 1, tmp_path, None)
    with pytest.raises(UserError, match=r"ended; see .*proxy\.log"):
        processes.check_running(settings, {processes.PROXY_LOG: ended})

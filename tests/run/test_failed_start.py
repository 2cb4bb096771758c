"""What never began leaves nothing behind that stands in the way of the next attempt."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from conftest import Command

BROKEN = """
from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.methods.averaging.fedavg import WeightAveraging


@register_method("mine", MethodParams)
class Mine(WeightAveraging[MethodParams]):
    def initial_state(self, weights):
        raise RuntimeError("a mistake in the plug-in")
"""


@pytest.fixture
def keys(tiny_overrides: tuple[str, ...]) -> list[str]:
    return [part for override in (*tiny_overrides, "rounds=1") for part in ("-o", override)]


def test_a_plugin_with_a_mistake_does_not_block_its_folder(vitfleet: Command, tmp_path: Path, keys: list[str]) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    command = ["run", "digits", *keys, "--plugin", "mine.py", "-o", "method.name=mine", "--out", "first"]
    with pytest.raises(RuntimeError, match="a mistake in the plug-in"):
        vitfleet(tmp_path, *command)
    assert not (tmp_path / "first").exists()


def test_a_folder_of_a_run_that_was_killed_before_its_first_round_is_used_again(
    vitfleet: Command, tmp_path: Path, keys: list[str]
) -> None:
    assert vitfleet(tmp_path, "run", "digits", *keys, "--out", "whole").returncode == 0
    begun = {"config.json", "about.json", "data.json", "partition.json", "machine.json"}
    (tmp_path / "first").mkdir()
    for name in begun:
        (tmp_path / "first" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    result = vitfleet(tmp_path, "run", "digits", *keys, "--seed", "5", "--out", "first")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "first" / "config.json").read_text())["seed"] == 5
    blocked = vitfleet(tmp_path, "run", "digits", *keys, "--out", "first")
    assert blocked.returncode == 2
    assert "first already holds a run" in blocked.stderr


@pytest.mark.timeout(300)
def test_a_server_whose_port_is_in_use_leaves_no_folder(vitfleet: Command, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        server = ["server", "digits", "--names", "a", "--insecure", "--host", "127.0.0.1", "--port", port]
        result = vitfleet(tmp_path, *server, "--out", "fleet")
        assert result.returncode == 2
        assert f"port {port}" in result.stderr
        assert "--port" in result.stderr, "the remedy"
        assert not (tmp_path / "fleet").exists()

"""What the documentation passes to Flower's own commands is what Flower understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from vitfleet.flower.server.server_app import open_folder

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"


def documented(option: str) -> list[dict[str, Any]]:
    """Return the values of an option in the commands of the page, as Flower parses them."""
    text = re.sub(r"\\\n\s*", " ", PAGE.read_text(encoding="utf-8"))
    lines = [re.sub(r'"\$\(.*?\)/app"', "APP", line) for line in text.splitlines() if f" {option} " in line]
    words = [shlex.split(line.strip()) for line in lines if line.startswith("    ")]
    return [parse_config_args([line[line.index(option) + 1]]) for line in words]


def test_node_settings() -> None:
    assert documented("--node-config") == [{"name": "kitchen", "data": "/srv/photos", "state": "/var/lib/vitfleet"}]


def test_run_settings_make_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fleet, simulation = documented("--run-config")
    folder = open_folder("", str(fleet["preset"]), str(fleet["overrides"]))
    assert folder.config().fleet.names == ("garden", "kitchen")
    assert folder.config().fleet.per_round == 2
    folder.release()
    assert simulation == {"folder": "/home/me/runs/simulated", "preset": "transfl-digits"}
    assert documented("--federation-config") == [{"num-supernodes": 10, "client-resources-num-cpus": 1}]

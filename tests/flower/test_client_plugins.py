"""A client runs a plug-in only if its owner installed it: never because a server names or sends it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import MakeConfig
from vitfleet.config.plugins import load_file
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.flower.device.client import _read_config
from vitfleet.flower.server.fleet import make_run_spec
from vitfleet.flower.transport.payloads import RunSpec

PLUGIN = """
from pathlib import Path

from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.methods.fedavg import WeightAveraging

Path(__file__).with_suffix(".loaded").touch()


@register_method("mine", MethodParams)
class Mine(WeightAveraging[MethodParams]):
    pass
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def spec_of(plugin: Path, tiny_config: MakeConfig) -> RunSpec:
    """Return what a server sends for a run with the plug-in's method."""
    config = tiny_config(f"method.name={plugin}:Mine")
    return make_run_spec(config, load_dataset(config.data), "run")


def test_run_spec_names_the_plugin_and_no_path(plugin: Path, tiny_config: MakeConfig) -> None:
    spec = spec_of(plugin, tiny_config)
    (needed,) = spec.plugins
    assert needed.startswith("method:mine:")
    assert str(plugin) not in spec.config
    assert json.loads(spec.config)["plugins"] == []


def test_client_with_the_same_plugin_reads_the_configuration(plugin: Path, tiny_config: MakeConfig) -> None:
    spec = spec_of(plugin, tiny_config)
    load_file(plugin)
    assert _read_config(spec).method.name == "mine"


def test_client_with_another_version_fails(plugin: Path, tiny_config: MakeConfig) -> None:
    spec = spec_of(plugin, tiny_config)
    plugin.write_text(PLUGIN + "# changed\n")
    load_file(plugin)
    with pytest.raises(UserError, match="method mine is another version on this client than on the server"):
        _read_config(spec)


def test_client_without_the_plugin_fails_and_loads_nothing(plugin: Path) -> None:
    """Even a server that names a path on the client's own disk cannot make it load the file."""
    spec = RunSpec("run", "{}", ["0"], 1, 8, ["method:mine:0"])
    with pytest.raises(UserError, match="its owner can add it: vitfleet client --plugin"):
        _read_config(spec)
    hostile = replace(spec, plugins=[], config=json.dumps({"plugins": [str(plugin)], "method": {"name": "mine"}}))
    with pytest.raises(UserError, match="must be one of"):
        _read_config(hostile)
    named = replace(spec, plugins=[], config=json.dumps({"method": {"name": f"{plugin}:Mine"}}))
    with pytest.raises(UserError, match="must be one of"):
        _read_config(named)
    assert not plugin.with_suffix(".loaded").exists()

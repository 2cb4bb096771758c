"""Flower's simulation engine runs the same app and gives the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chaos import server_state
from conftest import MakeConfig
from vitfleet.flower.commands import ServerSettings, environment, flower_config, free_port
from vitfleet.flower.flwr_cli import start_run
from vitfleet.flower.processes import stop_process_group, wait_for_superlink
from vitfleet.flower.server import follow
from vitfleet.run.folder import create_run_folder
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run

OVERRIDES = ("rounds=2", "fleet.clients=3", "fleet.per_round=2", "eval.clients=0", "method.name=transfl", "method.k=1")


@pytest.mark.long
def test_simulation_of_flower_equals_that_of_vitfleet(tiny_config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `flower-sim` is not installed")
    config = tiny_config(*OVERRIDES)
    folder, home, port = tmp_path / "flower", tmp_path / "home", free_port()
    fleet = config.fleet.model_copy(update={"kind": "flower", "join_s": 200.0})
    create_run_folder(config.model_copy(update={"fleet": fleet}), folder, "flower", ["test"]).release()
    home.mkdir()
    settings = ServerSettings("127.0.0.1", port, home, None)
    (home / "config.toml").write_text(flower_config(settings, port))
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        superlink = subprocess.Popen(command, env=environment(home), stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for_superlink(settings, port, superlink)
        federation = "num-supernodes=3 client-resources-num-cpus=1"
        flower_run_id = start_run(settings, folder, "--federation-config", federation)
        follow(settings, folder, flower_run_id)
    finally:
        stop_process_group(superlink)
    run_rounds(open_run(config, tmp_path / "simulation"))
    assert (tmp_path / "simulation" / "records.jsonl").read_bytes() == (folder / "records.jsonl").read_bytes()
    assert server_state(tmp_path / "simulation") == server_state(folder)

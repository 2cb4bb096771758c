"""The commands of a fleet: their output and their error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Command
from made_photos import draw_photos
from vitfleet.costs.estimate import Available
from vitfleet.data.sources.local import DataSpec, load_local

DIGITS = tuple(str(digit) for digit in range(10))


def test_certs_creates_a_key_for_every_client(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "certs", "fleet", "--host", "fleet.example.org", "--names", "kitchen, garden")
    assert result.returncode == 0, result.stderr
    for name in ("kitchen", "garden"):
        assert f"client {name}: copy fleet/ca.crt and fleet/nodes/{name} to it" in result.stdout
        assert (tmp_path / "fleet" / "nodes" / name).is_file()


def test_export_writes_every_clients_images(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "export-data", "digits", "--out", "shards", "--names", "a,b,c", "-o", "data.limit=100")
    assert result.returncode == 0, result.stderr
    spec = DataSpec(DIGITS, 1, 8, 0.2, 0.0)
    assert sum(len(load_local(tmp_path / "shards" / name, spec).train) for name in ("a", "b", "c")) == 100


def test_missing_certificates_are_reported_with_the_remedy(vitfleet: Command, tmp_path: Path) -> None:
    server = vitfleet(tmp_path, "server", "digits", "--certs", "nowhere")
    assert server.returncode == 2
    assert "ca.crt: missing; `vitfleet certs" in server.stderr
    assert not (tmp_path / "runs").exists()
    client = vitfleet(tmp_path, "client", "--server", "127.0.0.1", "--data", ".", "--name", "a", "--certs", "nowhere")
    assert client.returncode == 2
    assert "ca.crt: missing; copy it from the server" in client.stderr


def test_insecure_client_prints_a_warning(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "client", "--server", "127.0.0.1", "--data", "gone", "--name", "a", "--insecure")
    assert "warning: --insecure: no encryption" in result.stderr
    assert result.returncode == 2
    assert "--data gone: no such file or folder" in result.stderr


def test_run_rejects_a_flower_fleet(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "run", "digits", "-o", "fleet.kind=flower")
    assert result.returncode == 2
    assert "fleet.kind = 'flower': is started with `vitfleet server`" in result.stderr
    assert not list((tmp_path / "runs").iterdir())


def test_run_rejects_invalid_fleet_keys(vitfleet: Command, tmp_path: Path) -> None:
    for override, reason in {
        "fleet.over_provision=1": "needs fleet.kind = flower",
        "fleet.min_replies=6": "must be between 1 and fleet.per_round = 5",
        'fleet.names=["a"]': "needs fleet.kind = flower",
    }.items():
        result = vitfleet(tmp_path, "run", "digits", "-o", override)
        assert result.returncode == 2
        assert reason in result.stderr


def test_export_refuses_an_unknown_form(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "export-data", "digits", "--out", "shards", "--to", "csv")
    assert result.returncode == 2
    assert "--to csv: must be folders or parquet" in result.stderr


def test_server_counts_all_images_of_its_folder(
    vitfleet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = []
    draw_photos(tmp_path / "common", ("cat", "dog"))
    monkeypatch.setattr("vitfleet.cli.fleet._serve", lambda run_folder, settings: configs.append(run_folder.config()))
    result = vitfleet(tmp_path, "server", "digits", "--insecure", "--names", "a,b", "-o", "data.path=common")
    assert result.returncode == 0, result.stderr
    assert configs[0].data.test_only
    assert configs[0].fleet.names == ("a", "b")


def test_server_shows_its_estimate_and_refuses_what_does_not_fit(
    vitfleet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr("vitfleet.cli.fleet._serve", lambda run_folder, settings: served.append(run_folder.path))
    arguments = ("server", "digits", "--insecure", "--names", "a,b", "--out", "run")
    monkeypatch.setattr("vitfleet.costs.estimate.available", lambda device, folder: Available(1000, None))
    refused = vitfleet(tmp_path, *arguments)
    assert refused.returncode == 2
    assert "estimated for this machine, without the clients: about" in refused.stdout
    assert "MiB of memory, and 1000 B are free; make it smaller, or start it with --yes" in refused.stderr
    assert not (tmp_path / "run").exists()
    assert vitfleet(tmp_path, *arguments, "--yes").returncode == 0
    assert [path.name for path in served] == ["run"]

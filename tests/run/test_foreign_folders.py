"""A run's folder from elsewhere: resuming it deletes nothing that is not the run's, and runs no code unasked."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from conftest import Command, MakeConfig
from vitfleet.config import plugins, trust
from vitfleet.errors import UserError
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import open_run_folder
from vitfleet.run.setup import open_run


@pytest.fixture
def run(tiny_config: MakeConfig, tmp_path: Path) -> Path:
    """Return the folder of a run of one round."""
    config, folder = tiny_config("rounds=1", "trackers={}"), tmp_path / "run"
    run_rounds(open_run(config, folder))
    (folder / "config.json").write_text(config.model_dump_json())
    return folder


def test_a_checkpoint_that_is_a_link_is_refused_and_its_target_untouched(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "letters"
    elsewhere.mkdir()
    (elsewhere / "to ada.txt").write_text("dear ada")
    (run / "checkpoint").rename(tmp_path / "before")
    (run / "checkpoint").symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link"):
        Checkpoints(run)
    with pytest.raises(UserError, match="is a link"):
        open_run_folder(run)
    assert (elsewhere / "to ada.txt").read_text() == "dear ada"


@pytest.mark.parametrize("name", ["records.jsonl", "summary.json", "checkpoint/checkpoint.json", "model.safetensors"])
def test_a_file_of_a_run_that_is_a_link_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (run / name).rename(target)
    content = target.read_bytes()
    (run / name).symlink_to(target)
    with pytest.raises(UserError, match="is a link"):
        open_run_folder(run)
    assert target.read_bytes() == content


def test_only_files_of_checkpoints_are_removed(run: Path) -> None:
    stray = [run / "checkpoint" / "notes.txt", run / "checkpoint" / "previous" / "photo.png"]
    (run / "checkpoint" / "previous").mkdir(exist_ok=True)
    for path in stray:
        path.write_text("mine")
    (run / "checkpoint" / "folder").mkdir()
    Checkpoints(run)
    assert all(path.read_text() == "mine" for path in stray)


def test_what_an_interrupted_checkpoint_left_is_removed(run: Path) -> None:
    """A checkpoint that was begun says which files it will write; a crash leaves some of them."""
    checkpoints = Checkpoints(run)
    checkpoints.begin(["server-round-000002.safetensors"])
    left = run / "checkpoint" / "server-round-000002.safetensors"
    left.write_bytes(b"half")
    Checkpoints(run)
    assert not left.exists()


PLUGIN = '''
from pathlib import Path
from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.methods.averaging.fedavg import WeightAveraging

Path({marker!r}).write_text("run")


class MineParams(MethodParams):
    """Mine."""


@register_method("mine", MineParams)
class Mine(WeightAveraging):
    """Mine."""
'''


@pytest.fixture
def foreign(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose configuration names a plug-in that nobody here has ever loaded."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setattr(plugins, "_loaded", {})
    code = run / "mine.py"
    code.write_text(PLUGIN.format(marker=str(tmp_path / "marker")))
    tree = json.loads((run / "config.json").read_text())
    tree |= {"plugins": [str(code)], "method": {"name": "mine"}}
    (run / "config.json").write_text(json.dumps(tree))
    return run


COMMANDS = (["resume"], ["predict", "--"], ["evaluate"], ["export", "--to", "safetensors"])


@pytest.mark.parametrize("arguments", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_a_foreign_runs_plug_in_is_not_run_unasked(
    arguments: list[str], foreign: Path, vitfleet: Command, tmp_path: Path
) -> None:
    photo = [tmp_path / "photo.png"] if arguments[0] == "predict" else []
    done = vitfleet(tmp_path, arguments[0], *[a for a in arguments[1:] if a != "--"], foreign, *photo)
    assert done.returncode == 2
    assert "--trust-plugins" in done.stderr
    assert str(foreign / "mine.py") in done.stderr
    assert sha256((foreign / "mine.py").read_bytes()).hexdigest()[:12] in done.stderr
    assert not (tmp_path / "marker").exists()


def test_a_plug_in_is_trusted_once(
    foreign: Path, vitfleet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = vitfleet(tmp_path, "resume", foreign, "--trust-plugins")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "marker").exists()
    for _ in range(2):
        assert vitfleet(tmp_path, "resume", foreign).returncode == 0, "the answer is kept, for this content"
        monkeypatch.delenv(trust.VARIABLE, raising=False)  # as in another process
    with (foreign / "mine.py").open("a") as file:
        file.write("# changed\n")
    assert vitfleet(tmp_path, "resume", foreign).returncode == 2

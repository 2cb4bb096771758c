"""A damaged checkpoint is found before it is used; a full disk or GPU ends a run with one sentence."""

from __future__ import annotations

import errno
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Command
from vitfleet import files
from vitfleet.errors import UserError
from vitfleet.message import State
from vitfleet.run.checkpoints import store
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.state import RunState
from vitfleet.training.evaluator import Evaluator

Damage = Callable[[Path], None]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: list[Damage] = [flip_a_bit, truncate, Path.unlink]


def commit(checkpoints: Checkpoints, round: int) -> None:
    server = State({"w": torch.full((4,), float(round))})
    client = State({"c": torch.full((2,), float(round))})
    checkpoints.commit(RunState(server, round, last_seen={round: round}), {round: client}, (10 * round, round))
    checkpoints.wait()


@pytest.fixture
def three_rounds(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2, 3):
        commit(checkpoints, round)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["server-round-000003.safetensors", "client-000003-round-000003.safetensors"])
def test_the_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    damage: Damage, name: str, three_rounds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(three_rounds / "checkpoint" / name)
    with caplog.at_level(logging.WARNING):
        checkpoints = Checkpoints(three_rounds)
    (message,) = (record.getMessage() for record in caplog.records)
    assert name in message
    assert message.endswith("the run goes on from its checkpoint of round 2")
    state = checkpoints.load(torch.device("cpu"))
    assert state is not None
    assert (state.round, state.server.tensors["w"].tolist(), state.last_seen) == (2, [2.0] * 4, {2: 2})
    assert checkpoints.client(1) is not None
    assert checkpoints.client(3) is None
    commit(checkpoints, 3)
    caplog.clear()
    again = Checkpoints(three_rounds)
    assert again.latest is not None
    assert again.latest.round == 3
    assert not caplog.records


@pytest.mark.parametrize("damage", [*DAMAGES, lambda path: path.write_text("[]")])
def test_a_damaged_manifest_is_not_the_end(damage: Damage, three_rounds: Path) -> None:
    damage(three_rounds / "checkpoint" / "checkpoint.json")
    latest = Checkpoints(three_rounds).latest
    assert latest is not None
    assert latest.round in (2, 3)  # a changed bit of white space or of a number that is not used is no damage


def test_where_no_checkpoint_is_sound_the_message_says_what_is_lost(three_rounds: Path) -> None:
    flip_a_bit(three_rounds / "checkpoint" / "server-round-000003.safetensors")
    flip_a_bit(three_rounds / "checkpoint" / "previous" / "server-round-000002.safetensors")
    with pytest.raises(UserError, match=r"server-round-000003.* damaged.* no earlier checkpoint .*weights .* are lost"):
        Checkpoints(three_rounds)


def test_a_file_that_both_checkpoints_need_is_stored_once(three_rounds: Path) -> None:
    folder = three_rounds / "checkpoint"
    assert sorted(path.name for path in (folder / "previous").iterdir()) == [
        "checkpoint.json",
        "server-round-000002.safetensors",
    ]
    flip_a_bit(folder / "client-000001-round-000001.safetensors")
    with pytest.raises(UserError, match="client-000001-round-000001"):
        Checkpoints(three_rounds)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left"),
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_a_disk_that_refuses_ends_the_run_with_one_sentence_and_a_sound_checkpoint(
    code: int,
    words: str,
    vitfleet: Command,
    tiny_overrides: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[Path] = []

    def refusing(path: Path, data: files.Data) -> None:
        written.append(path)
        if "round-000002" in path.name:
            path.write_bytes(b"half")
            raise OSError(code, words, str(path))
        files.write_durably(path, data)

    options = [part for override in tiny_overrides for part in ("-o", override)]
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_durably", refusing)
        result = vitfleet(tmp_path, "run", "digits", *options, "--out", "run")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert "resume with vitfleet resume run" in result.stderr
    assert not list((tmp_path / "run").rglob("*round-000002*"))
    gc.collect()  # a command that ends releases its lock; here the process goes on
    resumed = vitfleet(tmp_path, "resume", "run")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize(
    ("kind", "message"),
    [(torch.OutOfMemoryError, "CUDA out of memory."), (RuntimeError, "CUDA error: out of memory\nmore lines")],
)
def test_a_full_gpu_ends_the_run_with_one_sentence_and_it_can_be_resumed(
    kind: type[RuntimeError],
    message: str,
    vitfleet: Command,
    tiny_overrides: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluate, calls = Evaluator.evaluate, []

    def fail_in_round_two(*args: Any, **kwargs: Any) -> Any:
        if (tmp_path / "my run" / "checkpoint" / "checkpoint.json").exists():
            calls.append(args)
            raise kind(message)
        return evaluate(*args, **kwargs)

    options = [part for override in tiny_overrides for part in ("-o", override)]
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", fail_in_round_two)
        result = vitfleet(tmp_path, "run", "digits", *options, "--out", "my run")
    assert calls
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "the GPU's memory is full; end what else uses it, then resume with vitfleet resume" in result.stderr
    assert "'" in result.stderr.split("vitfleet resume ")[1], "a path with a space is quoted"
    gc.collect()
    assert vitfleet(tmp_path, "resume", "my run").returncode == 0

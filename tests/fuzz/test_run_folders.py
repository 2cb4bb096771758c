"""Whatever happens to a file of a run's folder: resuming says what is wrong, or ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from case_limits import case_limits

from conftest import InterruptAfter, RecordProperty
from vitfleet.api import load_run
from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.run.checkpoint import StoredStates
from vitfleet.run.folder import create_run_folder, open_run_folder
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run

SETTINGS: tuple[str, ...] = (
    *("rounds=4", "data.limit=100", "model.dim=16", "model.depth=1", "model.heads=2", "model.patch_size=4"),
    *("fleet.clients=4", "fleet.per_round=2", "fleet.devices={}", "machine.device=cpu", "machine.threads=1"),
    *("train.epochs=1", "train.batch_size=32", "eval.every=4", "trackers={}", "method.name=fedper"),
)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a run that was interrupted in its fourth round, and the weights with which it would have ended."""
    folder = tmp_path_factory.mktemp("runs")
    config = load_config("digits", SETTINGS)
    for name, callbacks in (("whole", []), ("interrupted", [InterruptAfter(4)])):
        run_folder = create_run_folder(config, folder / name, "fuzz", ["vitfleet"])
        try:
            run_rounds(open_run(config, folder / name), callbacks=callbacks)
        except KeyboardInterrupt:
            pass
        finally:
            run_folder.release()
    return folder / "interrupted", dict(StoredStates.of_run(folder / "whole").server().tensors)


def mutate(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    kind = rng.choice(["flip", "flip", "flip", "truncate", "delete", "empty", "garbage", "longer", "folder"])
    if kind == "flip" and data:
        position = rng.randrange(len(data))
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :])
    elif kind == "truncate" and data:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "delete":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "garbage": rng.randbytes(100)}.get(kind, data + b"x"))


def resume(folder: Path) -> None:
    """Resume a run as the command does, and read its summary."""
    run_folder = open_run_folder(folder)
    try:
        run_rounds(open_run(run_folder.config(), folder))
    finally:
        run_folder.release()
    _ = load_run(folder).summary


def check_folders(
    interrupted: tuple[Path, dict[str, torch.Tensor]], out: Path, examples: int, seed: int
) -> Counter[str]:
    original, expected = interrupted
    rng, counts = random.Random(seed), Counter[str]()
    names = sorted(str(path.relative_to(original)) for path in original.rglob("*") if path.is_file())
    checkpoint_files = [name for name in names if name.startswith("checkpoint/")]
    for number in range(examples):
        folder = out / str(number)
        shutil.copytree(original, folder)
        name = rng.choice(checkpoint_files if rng.random() < 0.6 else names)
        mutate(folder / name, rng)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        try:
            with case_limits(size):
                resume(folder)
        except UserError:
            counts["ended with a sentence"] += 1
        except (IsADirectoryError, FileExistsError, NotADirectoryError):  # the command prints these as a sentence
            counts["ended with a sentence"] += 1
        else:
            counts["finished"] += 1
            if name.startswith("checkpoint/"):
                found = StoredStates.of_run(folder).server().tensors
                assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name
        shutil.rmtree(folder)
    return counts


def test_mutated_run_folders(interrupted: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    counts = check_folders(interrupted, tmp_path, 8, seed=0)
    assert counts["finished"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_mutated_run_folders(
    interrupted: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, record_property: RecordProperty
) -> None:
    counts = check_folders(interrupted, tmp_path, 1000, seed=1)
    record_property("mutated run folders", dict(counts))
    assert counts["finished"] > 100

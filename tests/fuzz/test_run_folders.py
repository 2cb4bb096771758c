"""Whatever happens to a file of a run's folder: resuming says what is wrong, or ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from case_limits import ALLOWANCE, LARGE_INPUT, MemoryUse, case_limits, settled_memory
from forged import UNITS, filled

from conftest import InterruptAfter, RecordProperty
from vitfleet.api import load_run
from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.run.checkpoints.store import StoredStates
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import create_run_folder, open_run_folder
from vitfleet.run.setup import open_run

SETTINGS: tuple[str, ...] = (
    *("rounds=4", "data.limit=100", "model.dim=16", "model.depth=1", "model.heads=2", "model.patch_size=4"),
    *("fleet.clients=4", "fleet.per_round=2", "fleet.devices={}", "machine.device=cpu", "machine.threads=1"),
    *("train.epochs=1", "train.batch_size=32", "eval.every=4", "trackers={}", "method.name=fedper"),
)
WIDE = "model.dim=256"  # the folder has 14 MB: ten times as much is what resuming it may take, and no constant
WIDE_SHARE = 5  # one of so many folders is of a wide model
NESTED = b"[" * 10**5
# A run whose last checkpoint is that of its third round of four, and the weights with which it would have ended.
Interrupted: TypeAlias = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return make_interrupted(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return make_interrupted(tmp_path_factory.mktemp("wide"), WIDE)


def make_interrupted(folder: Path, *overrides: str) -> Interrupted:
    config = load_config("digits", [*SETTINGS, *overrides])
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
    kind = rng.choice(["flip", "flip", "flip", "truncate", "delete", "empty", "garbage", "longer", "folder", "forged"])
    if kind == "flip" and data:
        position = rng.randrange(len(data))
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :])
    elif kind == "truncate" and data:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "delete":
        path.unlink()
    elif kind == "forged":
        path.write_bytes(rng.choice([NESTED, filled(rng.choice(UNITS), 50_000).encode()]) + b"\n")
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


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def own_memory(original: Path, out: Path) -> int:
    """Return the bytes that resuming an intact folder takes; the second time, when caches are filled."""
    use = MemoryUse()
    for number in range(2):
        folder = out / f"intact-{number}"
        shutil.copytree(original, folder)
        with case_limits(0, 2**40, use):
            resume(folder)
        shutil.rmtree(folder)
    return use.last


def check_folders(run: Interrupted, out: Path, examples: int, seed: int, counts: Counter[str]) -> MemoryUse:
    original, expected = run
    rng, use = random.Random(seed), MemoryUse()
    names = sorted(str(path.relative_to(original)) for path in original.rglob("*") if path.is_file())
    checkpoint_files = [name for name in names if name.startswith("checkpoint/")]
    with settled_memory():
        allowance = ALLOWANCE + own_memory(original, out)
        for number in range(examples):
            folder = out / str(number)
            shutil.copytree(original, folder)
            name = rng.choice(checkpoint_files if rng.random() < 0.6 else names)
            mutate(folder / name, rng)
            try:
                with case_limits(folder_bytes(folder), allowance, use):
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
    return use


def test_mutated_run_folders(interrupted: Interrupted, tmp_path: Path) -> None:
    counts = Counter[str]()
    check_folders(interrupted, tmp_path, 4, 0, counts)
    assert counts["finished"]


@pytest.mark.parametrize("content", [NESTED, b"[[]]\n"], ids=["nested", "list"])
def test_a_file_with_other_json_ends_in_no_traceback(interrupted: Interrupted, content: bytes, tmp_path: Path) -> None:
    original, _ = interrupted
    for number, path in enumerate(sorted([*original.rglob("*.json"), *original.rglob("*.jsonl")])):
        folder = tmp_path / str(number)
        shutil.copytree(original, folder)
        (folder / path.relative_to(original)).write_bytes(content)
        with suppress(UserError):  # others are only written, or there is another copy of what they say
            resume(folder)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_mutated_run_folders(
    interrupted: Interrupted, wide: Interrupted, tmp_path: Path, record_property: RecordProperty
) -> None:
    counts = Counter[str]()
    assert folder_bytes(wide[0]) > LARGE_INPUT
    uses = [
        check_folders(interrupted, tmp_path, 1000 - 1000 // WIDE_SHARE, 1, counts),
        check_folders(wide, tmp_path, 1000 // WIDE_SHARE, 2, counts),
    ]
    record_property("mutated run folders", dict(counts))
    record_property("memory of mutated run folders", str(MemoryUse.most(uses)))
    assert counts["finished"] > 100

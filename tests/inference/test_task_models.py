"""Models of runs on tasks: predictions with and without a known task; the matrix again from the kept models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import vitfleet
from conftest import Command, InterruptAfter, MakeConfig
from vitfleet.config.schema import Config
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.run.callbacks import Callback
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run

TASKS = (
    "data.tasks.count=3",
    "data.tasks.classes=3",
    "data.tasks.rounds_per_task=1",
    "data.tasks.per_client=[2,3]",
    "data.tasks.share=[0.2,0.4]",
    "data.tasks.keep_models=true",
    "fleet.clients=3",
    "fleet.per_round=2",
    "machine.checkpoint_every=4",
    "rounds=3",
)


def start(config: Config, folder: Path, *callbacks: Callback) -> vitfleet.Run:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    run_rounds(open_run(config, folder), callbacks=callbacks)
    return vitfleet.load_run(folder)


def test_matrix_and_forgetting_are_computed_again_from_the_kept_models(
    tiny_config: MakeConfig, vitfleet: Command, tmp_path: Path
) -> None:
    """Also after an interruption, and after the folder was moved."""
    config = tiny_config("method.name=fedper", *TASKS)
    with pytest.raises(KeyboardInterrupt):
        start(config, tmp_path / "run", InterruptAfter(2))
    start(config, tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    done = vitfleet(tmp_path, "evaluate", str(tmp_path / "moved"), "--after-tasks", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    recorded = [record.task for record in read_records(tmp_path / "moved") if record.task is not None]
    assert found["by_task"] == [record.matrix for record in recorded]
    assert found["average_accuracy"] == recorded[-1].average_accuracy
    assert found["forgetting"] == recorded[-1].forgetting
    assert found["backward_transfer"] == recorded[-1].backward_transfer
    # A state that did not change between two tasks is on the disk once.
    states = list((tmp_path / "moved" / "task-models").rglob("client-*"))
    assert len({path.stat().st_ino for path in states}) == len({path.name for path in states})


def test_predictions_with_a_known_task_are_among_its_classes(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run = start(tiny_config("method.name=fedper", *TASKS), tmp_path / "run")
    model = run.model(client=0)
    data = load_dataset(run.config.data)
    images = data.test.images[:50]
    logits = model(images)
    classes = model.tasks[1]
    assert len(classes) == 3
    known = model.probabilities(images, task=1)
    torch.testing.assert_close(known[:, classes], logits[:, classes].softmax(dim=1))
    assert torch.equal(known.argmax(dim=1), torch.tensor(classes)[logits[:, classes].argmax(dim=1)])
    assert set(model.predict(images[0], task=1).probabilities) == {model.classes[index] for index in classes}
    assert len(model.predict(images[0]).probabilities) == 10
    with pytest.raises(UserError, match="task = 3: must be between 0 and 2"):
        model.predict(images[0], task=3)
    (told,), _ = vitfleet.evaluate(run, client=0, known_task=True)
    (not_told,), _ = vitfleet.evaluate(run, client=0)
    of_class = np.array(model.info.class_to_task)
    all_logits = model(data.test.images).detach().numpy()
    all_labels = data.test.labels.numpy()
    assert not_told.accuracy == pytest.approx((all_logits.argmax(axis=1) == all_labels).mean())
    all_logits[of_class[None] != of_class[all_labels][:, None]] = -np.inf
    assert told.accuracy == pytest.approx((all_logits.argmax(axis=1) == all_labels).mean())
    assert told.accuracy > not_told.accuracy


def test_without_kept_models_the_remedy_is_named(tiny_config: MakeConfig, tmp_path: Path) -> None:
    keys = [key for key in TASKS if "keep_models" not in key]
    run = start(tiny_config("method.name=fedper", *keys), tmp_path / "run")
    assert not (tmp_path / "run" / "task-models").exists()
    with pytest.raises(UserError, match=r"train with -o data.tasks.keep_models=true"):
        run.task_matrix()

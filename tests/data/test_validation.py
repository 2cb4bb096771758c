"""Validation images: held out of the training images, in the place of the test images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console

import vitfleet
from made_sets import grey_levels, own_images, write_images, write_parquet
from vitfleet.config import load_config
from vitfleet.config.schema import DataConfig
from vitfleet.data.images import DataSet, ImageSet
from vitfleet.data.sources.from_objects import from_tensors
from vitfleet.data.sources.load import load_dataset
from vitfleet.data.subsets import hold_out_validation
from vitfleet.errors import DataError, UserError
from vitfleet.report.console.results import summary_table
from vitfleet.report.html.page import write_report
from vitfleet.run.output.model_file import read_data_info
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState

SMALL: dict[str, Any] = {"rounds": 2, "fleet.clients": 4, "fleet.per_round": 2, "train.epochs": 1}
TASKS: dict[str, Any] = {"data.tasks": {"count": 2, "classes": 5, "rounds_per_task": 1, "share": [0.1, 0.5]}}


class Interrupt(vitfleet.Callback):
    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        if state.round == 1:
            raise KeyboardInterrupt


def numbered(labels: list[int]) -> NDArray[np.uint8]:
    """Return images of which each is recognised by its grey level."""
    levels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    return np.broadcast_to(levels, (len(labels), 1, 8, 8)).copy()


def numbered_set(train: list[int], test: list[int]) -> DataSet:
    images = numbered(train + test)
    return from_tensors(images[: len(train)], np.array(train), test=(images[len(train) :], np.array(test)))


def test_held_out_images_are_a_share_of_every_class_of_the_training_images() -> None:
    whole = numbered_set([0] * 100 + [1] * 40 + [2] * 10, [0, 1, 2] * 10)
    data = hold_out_validation(whole, 0.2)
    train, validation, test = (set(grey_levels(split.images)) for split in (data.train, data.test, whole.test))
    assert train | validation == set(range(150))
    assert not train & validation
    assert not (train | validation) & test
    assert data.test.labels.bincount().tolist() == [20, 8, 2]
    for split in (data.train, data.test):  # images keep their labels
        assert torch.equal(split.labels, whole.train.labels[grey_levels(split.images)])


def test_share_of_zero_changes_nothing() -> None:
    data = numbered_set([0, 1] * 10, [0, 1])
    assert hold_out_validation(data, 0.0) is data


def test_sources_stay_with_their_images() -> None:
    images = torch.from_numpy(numbered([0] * 20))
    split = ImageSet(images, torch.zeros(20, dtype=torch.int64), torch.arange(20))
    data = hold_out_validation(DataSet("made", ("one",), split, split), 0.25)
    for part in (data.train, data.test):
        assert part.sources is not None
        assert part.sources.tolist() == grey_levels(part.images)


def test_too_few_images_are_an_error() -> None:
    with pytest.raises(DataError, match=r"2 training images are too few for data\.validation = 0\.1"):
        hold_out_validation(numbered_set([0, 1], [0, 1]), 0.1)


@pytest.mark.usefixtures("isolated_data")
def test_parquet_with_a_test_split(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1] * 50)
    write_parquet(tmp_path / "test.parquet", [0, 1] * 10, first_grey=200)
    data = load_dataset(own_images(tmp_path, validation=0.1))
    assert (len(data.train), len(data.test)) == (90, 10)
    assert max(grey_levels(data.train.images) + grey_levels(data.test.images)) < 200


@pytest.mark.usefixtures("isolated_data")
def test_folder_without_a_test_split_keeps_its_test_images_apart(tmp_path: Path) -> None:
    write_images(tmp_path / "a", 20)
    write_images(tmp_path / "b", 20)
    data = load_dataset(own_images(tmp_path, validation=0.25))
    assert (len(data.train), len(data.test)) == (24, 8)  # 8 test images are held out first


def test_limit_is_applied_first() -> None:
    data = load_dataset(DataConfig(name="digits", limit=200, validation=0.1))
    assert len(data.train) + len(data.test) == 200
    assert data.test.labels.bincount().tolist() == [2] * 10


def garbage(data: dict[str, Any]) -> dict[str, Any]:
    images, labels = data["test"]
    return {**data, "test": (255 - images, (labels + 3) % 4)}


@pytest.mark.parametrize("method", ["fedavg", "standalone", "eftvit"])
@pytest.mark.usefixtures("without_figure_files")
def test_test_images_change_nothing(method: str, tmp_path: Path) -> None:
    labels = [0, 1, 2, 3] * 60
    images = numbered(labels)
    array = np.array(labels)
    data = {"train": (images[:200], array[:200]), "test": (images[200:], array[200:])}
    keys = {**SMALL, "data.validation": 0.2}
    for name, passed in (("good", data), ("garbage", garbage(data))):
        vitfleet.train("digits", method=method, data=passed, overrides=keys, out=tmp_path / name)
    good, other = ((tmp_path / name / "records.jsonl").read_bytes() for name in ("good", "garbage"))
    assert good == other
    tested = vitfleet.load_run(tmp_path / "good").clients["tested"]
    assert 0 < tested.max() <= 40


@pytest.mark.parametrize("more", [{}, TASKS], ids=["partition", "tasks"])
def test_run_resumes_with_the_same_validation_images(more: dict[str, Any], tmp_path: Path) -> None:
    keys = {**SMALL, **more, "data.validation": 0.2, "data.limit": 300}
    vitfleet.train("digits", overrides=keys, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        vitfleet.train("digits", overrides=keys, out=tmp_path / "stopped", callbacks=[Interrupt()])
    run = vitfleet.load_run(tmp_path / "stopped").resume()
    assert (tmp_path / "stopped/records.jsonl").read_bytes() == (tmp_path / "whole/records.jsonl").read_bytes()
    assert run.summary["eval_split"] == "validation"


@pytest.mark.usefixtures("without_figure_files")
def test_validation_images_are_the_same_for_every_method_and_seed(tmp_path: Path) -> None:
    keys = {**SMALL, "rounds": 1, "data.limit": 200, "data.validation": 0.1, "data.partition.kind": "iid"}
    compared = vitfleet.compare(
        "digits", methods=["fedavg", "standalone"], seeds=(0, 1), overrides=keys, out=tmp_path / "c"
    )
    splits = [load_dataset(run.config.data).test.images for run in compared.runs]
    assert all(torch.equal(split, splits[0]) for split in splits)
    assert {summary["eval_split"] for row in compared.result.rows for summary in row.summaries} == {"validation"}


@pytest.mark.usefixtures("without_figure_files")
def test_report_summary_and_data_file_name_the_validation_images(tmp_path: Path) -> None:
    run = vitfleet.train("digits", overrides={**SMALL, "data.validation": 0.2, "data.limit": 200}, out=tmp_path / "run")
    assert read_data_info(run.path).eval_split == "validation"
    assert run.summary["loss"].keys() == {"train", "validation"}
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as captured:
        console.print(summary_table(run.summary, ""))
    text = captured.get()
    assert "local validation accuracy" in text
    assert "test accuracy" not in text
    page = write_report([run.path]).read_text()
    assert "accuracy on validation images" in page
    assert "Local validation accuracy" in page
    assert "est accuracy" not in page


def test_clients_with_their_own_images_reject_it() -> None:
    with pytest.raises(UserError, match=r"data\.validation = 0\.1: must be 0 with fleet\.kind = flower"):
        load_config("digits", ["data.validation=0.1", "fleet.kind=flower"])

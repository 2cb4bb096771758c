"""Training, records, models and resuming through the public API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import vitfleet
from vitfleet.config.registry import METHODS
from vitfleet.errors import ConfigError, UserError
from vitfleet.methods.fedprox import FedProx, FedProxParams
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState

pytestmark = pytest.mark.usefixtures("without_figure_files")

SMALL: dict[str, Any] = {"rounds": 2, "fleet.clients": 4, "fleet.per_round": 2, "data.limit": 200, "train.epochs": 1}


class Interrupt(vitfleet.Callback):
    """Interrupts a run after its first round, as Ctrl-C does."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        if state.round == 1:
            raise KeyboardInterrupt


def test_import_is_cheap_and_lists_the_public_names() -> None:
    code = "import sys, vitfleet; assert 'train' in dir(vitfleet); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    for name in vitfleet.__all__:
        assert getattr(vitfleet, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        vitfleet.trian  # noqa: B018


@pytest.mark.parametrize(
    "method",
    ["fedprox", FedProx, {"name": "fedprox", "mu": 0.01}, FedProxParams(mu=0.01), METHODS.make_params("fedprox")],
    ids=["name", "class", "dict", "params", "tagged params"],
)
def test_method_is_taken_in_every_form(method: Any, tmp_path: Path) -> None:
    run = vitfleet.train("digits", method=method, overrides={**SMALL, "rounds": 1}, out=tmp_path / "run")
    assert run.config.method == METHODS.make_params("fedprox", mu=0.01)
    assert run.config.title == "", "the preset's title names another method"


def test_records_clients_and_summary_agree(tmp_path: Path) -> None:
    run = vitfleet.train("digits", overrides=SMALL, out=tmp_path / "run", seed=3)
    assert run.finished
    assert run.config.seed == 3
    assert list(run.records["round"]) == [1, 2]
    assert run.records["accuracy.global"].iloc[-1] == run.summary["accuracy"]["global"]
    assert run.clients["up_bytes"].sum() == run.summary["total"]["up_bytes"]
    assert "finished" in repr(vitfleet.load_run(tmp_path / "run"))


def test_interrupted_run_resumes_to_the_same_records(tmp_path: Path) -> None:
    vitfleet.train("digits", overrides=SMALL, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        vitfleet.train("digits", overrides=SMALL, out=tmp_path / "stopped", callbacks=[Interrupt()])
    run = vitfleet.load_run(tmp_path / "stopped")
    assert not run.finished
    with pytest.raises(UserError, match="is not finished"):
        run.summary  # noqa: B018
    assert run.resume().finished
    assert (tmp_path / "stopped/records.jsonl").read_bytes() == (tmp_path / "whole/records.jsonl").read_bytes()


def test_added_rounds_are_those_of_a_longer_run(tmp_path: Path) -> None:
    """With a constant learning rate, a run with added rounds is the longer run."""
    keys = {**SMALL, "train.schedule": "constant", "train.warmup_rounds": 0, "eval.every": 1}
    vitfleet.train("digits", overrides={**keys, "rounds": 3}, out=tmp_path / "long")
    run = vitfleet.train("digits", overrides={**keys, "rounds": 2}, out=tmp_path / "short")
    with pytest.raises(UserError, match="--rounds 2: must be more than the run's 2"):
        run.resume(rounds=2)
    assert run.finished
    run.resume(rounds=3)
    assert (run.config.rounds, run.summary["rounds"]) == (3, 3)
    assert (tmp_path / "short/records.jsonl").read_bytes() == (tmp_path / "long/records.jsonl").read_bytes()


def test_model_predicts_as_the_run_measured(tmp_path: Path) -> None:
    """The model's accuracy on the test images is the one in the records."""
    from vitfleet.data.sources.load import load_dataset

    run = vitfleet.train("digits", overrides={**SMALL, "train.epochs": 3}, out=tmp_path / "run")
    model = run.model()
    data = load_dataset(run.config.data)
    with torch.inference_mode():
        correct = (model(data.test.images).argmax(dim=1) == data.test.labels).float().mean()
    assert float(correct) == pytest.approx(run.summary["accuracy"]["global"])
    prediction = model.predict(load_digits().images[0] / 16)
    assert prediction.label in model.classes
    assert sum(prediction.probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert prediction.probability == max(prediction.probabilities.values())


def test_model_of_a_client_has_its_own_head(tmp_path: Path) -> None:
    run = vitfleet.train("digits", method="fedper", overrides=SMALL, out=tmp_path / "run")
    first, second = sorted(set(run.clients["client"]))[:2]
    heads = [run.model(int(client)).state_dict()["vit.head.weight"] for client in (first, second)]
    assert not torch.equal(*heads)
    with pytest.raises(UserError, match="client = 9: must be between 0 and 3"):
        run.model(9)


def test_images_of_the_wrong_shape_are_rejected_by_the_model(tmp_path: Path) -> None:
    model = vitfleet.train("digits", overrides={**SMALL, "rounds": 1}, out=tmp_path / "run").model()
    with pytest.raises(ValueError, match=r"not \[batch, 1, height, width\]"):
        model(torch.zeros(2, 3, 8, 8))
    with pytest.raises(UserError, match="is not a readable image"):
        model.predict(tmp_path / "none.png")


def test_data_from_tensors_trains_and_resumes_with_the_same_data_only(tmp_path: Path) -> None:
    digits = load_digits()
    images = np.round(digits.images * 255 / 16).astype(np.uint8)[:, None]
    data = {"train": (images[:300], digits.target[:300]), "test": (images[300:400], digits.target[300:400])}
    options = {key: value for key, value in SMALL.items() if key != "data.limit"}
    with pytest.raises(KeyboardInterrupt):
        vitfleet.train("digits", data=data, overrides=options, out=tmp_path / "run", callbacks=[Interrupt()])
    run = vitfleet.load_run(tmp_path / "run")
    other = {**data, "train": (images[1:301], digits.target[1:301])}
    with pytest.raises(ConfigError, match="the data passed is another one"):
        run.resume(data=other)
    with pytest.raises(ConfigError, match="started with data from Python"):
        run.resume()
    assert run.resume(data=data).finished


def test_limit_holds_for_data_from_tensors(tmp_path: Path) -> None:
    digits = load_digits()
    images = np.round(digits.images * 255 / 16).astype(np.uint8)[:, None]
    data = {"train": (images[:900], digits.target[:900]), "test": (images[900:], digits.target[900:])}
    run = vitfleet.train("digits", data=data, overrides={**SMALL, "data.limit": 100, "rounds": 1}, out=tmp_path / "run")
    counts = json.loads((tmp_path / "run" / "partition.json").read_text())["counts"]
    assert run.finished
    assert np.sum(counts) == 100


def test_data_from_a_folder(tmp_path: Path) -> None:
    from PIL import Image

    for label in ("dark", "light"):
        for number in range(12):
            path = tmp_path / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (20 * number if label == "dark" else 255,) * 3).save(path)
    options = {"rounds": 1, "fleet.clients": 2, "fleet.per_round": 2, "data.partition.kind": "iid"}
    run = vitfleet.train("digits", data=tmp_path / "images", overrides=options, out=tmp_path / "run")
    assert run.model().classes == ("dark", "light")


def test_data_of_another_kind_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data = int: must be a folder"):
        vitfleet.train("digits", data=3, out=tmp_path / "run")


def test_run_that_cannot_be_set_up_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.clients"):
        vitfleet.train("digits", overrides={"fleet.clients": 100_000}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_cost_needs_no_data() -> None:
    reports = vitfleet.cost("eftvit-cifar100", methods=["eftvit", "fedavg"])
    assert [report.method for report in reports] == ["eftvit", "fedavg"]
    assert reports[0].train_gflops < reports[1].train_gflops / 5

"""Predicting and evaluating image files: through the API and through the commands."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitfleet
from made_photos import draw_photos
from vitfleet.data.sources.image_folder import read_image_folder
from vitfleet.errors import UserError
from vitfleet.inference.evaluate import evaluate_images, summarise
from vitfleet.inference.image_files import find_images, read_labelled
from vitfleet.run.evaluate.predictions import CALIBRATION_BINS

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of photos with a damaged file, a greyscale file and a folder of an unknown class."""
    folder = tmp_path / "photos"
    draw_photos(folder, ("grass", "roof", "sea", "weasel"), 3)
    (folder / "grass" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a photo")
    Image.new("L", (12, 12), 200).save(folder / "roof" / "grey.png")
    return folder


def test_files_are_predicted_as_the_same_images_in_memory(photo_run: vitfleet.Run, photos: Path) -> None:
    files = [photos / "grass" / "0.png", photos / "sea" / "1.png"]
    predicted = vitfleet.predict(photo_run, files, client=1, batch_size=1)
    model = photo_run.model(client=1)
    for file, image in zip(files, predicted, strict=True):
        pixels = np.asarray(Image.open(file).crop((2, 0, 18, 16)))  # 20 x 16 pixels: the square at its centre
        logits = model(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])
        assert image.prediction is not None
        expected = logits.softmax(dim=1)[0].tolist()
        assert list(image.prediction.probabilities.values()) == pytest.approx(expected, abs=1e-6)
        assert image.prediction.top(2)[0] == (image.prediction.label, max(expected))


def test_folder_with_unusual_files_is_predicted_with_one_line_each(
    photo_run: vitfleet.Run, photos: Path, vitfleet: Command, tmp_path: Path
) -> None:
    done = vitfleet(tmp_path, "predict", str(photo_run.path), str(photos), "missing.png", "--top", "2", "--json")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 3
    assert any("broken.jpg: is not a readable image" in line for line in lines)
    assert any("grey.png: is greyscale; its grey is used for all three colours" in line for line in lines)
    assert any("missing.png: no such file" in line for line in lines)
    rows = json.loads(done.stdout)
    assert len(rows) == 4 * 3 + 3
    assert sum(len(row["top"]) == 2 for row in rows) == 4 * 3 + 1
    table = vitfleet(tmp_path, "predict", str(photo_run.path), str(photos), "--top", "1", "--csv")
    cells = list(csv.DictReader(io.StringIO(table.stdout)))
    assert [row["class_1"] for row in cells] == [row["top"][0]["class"] if row["top"] else "" for row in rows[:-1]]


def test_evaluation_of_a_folder_leaves_out_what_it_cannot_use_with_one_line_each(
    photo_run: vitfleet.Run, photos: Path, vitfleet: Command, tmp_path: Path
) -> None:
    done = vitfleet(tmp_path, "evaluate", str(photo_run.path), "--data", str(photos), "--client", "all", "--json")
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith(str(photos))]
    assert len(notes) == 3
    assert any("weasel: is not a class of the model; 3 images are left out" in line for line in notes)
    assert any("broken.jpg: is not a readable image" in line for line in notes)
    assert any("grey.png: is greyscale" in line for line in notes)
    evaluations = json.loads(done.stdout.splitlines()[-1])
    assert [evaluation["model"] for evaluation in evaluations] == ["client 0", "client 1", "client 2"]
    for evaluation in evaluations:
        assert evaluation["images"] == 3 * 3 + 1
        assert np.trace(evaluation["confusion"]) / 10 == pytest.approx(evaluation["accuracy"])
    out = tmp_path / "evaluation"
    done = vitfleet(
        tmp_path, "evaluate", str(photo_run.path), "--data", str(photos), "--client", "2", "--out", str(out)
    )
    assert "most often mistaken for" in done.stdout
    assert json.loads((out / "evaluation.json").read_text()) == evaluations[2:]
    with Image.open(out / "confusion.png") as picture:
        assert picture.width > 500


def test_evaluation_on_the_runs_own_test_images_is_what_the_run_measured(photo_run: vitfleet.Run) -> None:
    (server,), notes = vitfleet.evaluate(photo_run)
    assert notes == ()
    assert server.accuracy == pytest.approx(photo_run.summary["server_model"]["accuracy"])
    assert server.loss == pytest.approx(photo_run.summary["server_model"]["loss"], rel=1e-5)
    clients, _ = vitfleet.evaluate(photo_run, client="all")
    mean = sum(evaluation.accuracy for evaluation in clients) / 3
    assert mean == pytest.approx(photo_run.summary["accuracy"]["global"])


def test_a_model_file_is_evaluated_like_its_run(photo_run: vitfleet.Run, photos: Path) -> None:
    from_run, _ = vitfleet.evaluate(photo_run, photos)
    from_file, _ = vitfleet.evaluate(photo_run.path / "model.safetensors", photos)
    assert from_run == from_file
    with pytest.raises(UserError, match="a model file holds one model"):
        vitfleet.load_model(photo_run.path / "model.safetensors", client=1)
    with pytest.raises(UserError, match="a model file has no images of its own"):
        vitfleet.evaluate(photo_run.path / "model.safetensors")


def test_calibration_and_confusion_by_brute_force() -> None:
    random = np.random.default_rng(0)
    probabilities = random.dirichlet([0.5] * 4, 200)
    probabilities[0] = [1.0, 0.0, 0.0, 0.0]
    labels = random.integers(0, 3, 200)  # no image of the fourth class
    logits = torch.from_numpy(np.log(probabilities.clip(1e-30)))
    found = summarise("server", logits, torch.from_numpy(labels), ("a", "b", "c", "d"))
    error, confusion = 0.0, [[0] * 4 for _ in range(4)]
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(probabilities, labels, strict=True):
        best = max(range(4), key=lambda index: row[index])
        confusion[label][best] += 1
        which = next(b for b in range(CALIBRATION_BINS) if row[best] <= (b + 1) / CALIBRATION_BINS + 1e-12)
        bins.setdefault(which, []).append((row[best], best == label))
    for members in bins.values():
        accuracy = sum(correct for _, correct in members) / len(members)
        error += len(members) / 200 * abs(accuracy - sum(share for share, _ in members) / len(members))
    assert found.calibration_error == pytest.approx(error)
    assert found.confusion == confusion
    assert found.class_accuracy["d"] is None
    assert found.class_accuracy["b"] == pytest.approx(confusion[1][1] / sum(confusion[1]))
    assert found.accuracy == pytest.approx(sum(confusion[i][i] for i in range(4)) / 200)


def test_what_cannot_be_found_is_named(photo_run: vitfleet.Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no file with the ending of an image format"):
        find_images([tmp_path / "empty"])
    with pytest.raises(UserError, match="holds no readable image of a class of the model"):
        read_labelled(tmp_path / "empty", ("a", "b"), 8, 3)
    with pytest.raises(UserError, match="no such run folder or model file"):
        vitfleet.load_model(tmp_path / "none")
    with pytest.raises(UserError, match="the model was not trained on tasks"):
        vitfleet.predict(photo_run, [tmp_path / "any.png"], task=0)


def test_images_in_batches_of_any_size_give_the_same_evaluation(photo_run: vitfleet.Run, photos: Path) -> None:
    model = photo_run.model()
    labelled = read_labelled(photos, model.classes, model.image_size, model.channels)
    whole, single = (evaluate_images(model, labelled.images, batch_size=size) for size in (64, 3))
    assert whole.confusion == single.confusion
    assert whole.loss == pytest.approx(single.loss, rel=1e-5)
    assert read_image_folder(photos).classes == ("grass", "roof", "sea", "weasel")

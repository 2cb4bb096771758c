"""Exported models compute what the original computes, through the software that they are for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

import vitfleet
from made_photos import draw_photos, make_run
from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.exporters.graph import ExportGraph
from vitfleet.exporters.weights import frozen_base
from vitfleet.exporters.write import upload, write_export
from vitfleet.fleet.build import build_net
from vitfleet.inference.classifier import Classifier
from vitfleet.models.zoo import build_model
from vitfleet.run.output.model_file import DataInfo, model_info

needs_onnx = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs the extra export: onnx, onnxruntime, onnxscript",
)
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the extra export: peft")
needs_executorch = pytest.mark.skipif(importlib.util.find_spec("executorch") is None, reason="needs executorch")

# A plain ViT, and smaller forms of two of timm's architectures: one plain, one a pyramid.
FAMILIES = {
    "vit": ("model.name=vit", "model.dim=32", "model.depth=3", "model.heads=2"),
    "deit": ("model.name=deit_tiny_patch16_224", "model.image_size=32", "model.patch_size=4", "model.depth=2"),
    "swin": ("model.name=swin_tiny_patch4_window7_224", "model.image_size=56"),
}
# The plain ViT is what most runs train: its graphs are always tested, the others with the long tests.
FAMILY_CASES = ["vit", *(pytest.param(family, marks=pytest.mark.long) for family in FAMILIES if family != "vit")]


def untrained(*overrides: str, image_size: int = 16, channels: int = 3) -> Classifier:
    """Return a model of random weights; the head's too, so that logits differ between images."""
    config = load_config("digits", [*overrides, "model.patch_size=4" if "model.name=vit" in overrides else "seed=0"])
    data = DataInfo("photos", ("grass", "roof", "sea"), channels, image_size)
    net = build_model(config.model, 3, channels, image_size, 0)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in net.initial_weights().items()
    }
    return Classifier(net, weights, model_info(config, data, net, rounds=3))


def images_for(model: Classifier, count: int = 100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    shape = (count, model.channels, model.image_size, model.image_size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def reference(model: Classifier, pixels: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in torch.split(pixels, 25)])


@pytest.mark.parametrize("family", ["vit", "deit", pytest.param("swin", marks=pytest.mark.long)])
def test_timm_loads_an_export_itself(family: str, tmp_path: Path) -> None:
    model = untrained(*FAMILIES[family])
    written = write_export(model, "timm", tmp_path)
    assert written.max_difference < 1e-4
    config = json.loads((tmp_path / "config.json").read_text())
    built: Any = timm.create_model(config["architecture"], num_classes=3, **config["model_args"])
    built.load_state_dict(load_file(tmp_path / "model.safetensors"))
    from_folder = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert from_folder.pretrained_cfg["label_names"] == ["grass", "roof", "sea"]
    pixels = images_for(model)
    normalised = model.preprocess(pixels)
    with torch.inference_mode():
        for loaded in (built, from_folder):
            torch.testing.assert_close(loaded.eval()(normalised), reference(model, pixels), atol=1e-4, rtol=0)


def onnx_outputs(path: Path, images: torch.Tensor) -> tuple[np.ndarray, dict[str, str]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": images.numpy()})
    return logits, session.get_modelmeta().custom_metadata_map


@needs_onnx
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_onnxruntime_computes_the_same_for_any_number_of_images(family: str, tmp_path: Path) -> None:
    model = untrained(*FAMILIES[family])
    written = write_export(model, "onnx", tmp_path, int8=True)
    assert written.max_difference < 1e-4
    pixels = images_for(model)
    images = ExportGraph(model).prepare(pixels)
    for count in (1, 100):
        logits, metadata = onnx_outputs(tmp_path / "model.onnx", images[:count])
        np.testing.assert_allclose(logits, reference(model, pixels[:count]).numpy(), atol=1e-4)
    assert json.loads(metadata["vitfleet.classes"]) == ["grass", "roof", "sea"]
    assert json.loads(metadata["vitfleet.mean"]) == list(model.info.mean)
    assert written.quantised is not None
    assert written.quantised.accuracy is None, "random images have no classes"
    quantised, _ = onnx_outputs(tmp_path / "model-int8.onnx", images)
    same = (quantised.argmax(axis=1) == reference(model, pixels).numpy().argmax(axis=1)).mean()
    assert same == pytest.approx(written.quantised.agreement, abs=0.1)
    assert written.quantised.bytes < written.quantised.original_bytes


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_program_of_torch_export_computes_the_same(family: str, tmp_path: Path) -> None:
    model = untrained(*FAMILIES[family])
    assert write_export(model, "torch-export", tmp_path).max_difference < 1e-4
    extra = {"vitfleet.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    assert json.loads(extra["vitfleet.json"])["classes"] == ["grass", "roof", "sea"]
    pixels = images_for(model)
    with torch.inference_mode():
        logits = program.module()(ExportGraph(model).prepare(pixels))
    torch.testing.assert_close(logits, reference(model, pixels), atol=1e-4, rtol=0)


@needs_executorch
@pytest.mark.long
@pytest.mark.parametrize("family", ["vit", "deit"])
def test_executorch_computes_the_same(family: str, tmp_path: Path) -> None:
    assert write_export(untrained(*FAMILIES[family]), "executorch", tmp_path).max_difference < 1e-4


@needs_peft
@pytest.mark.long
def test_low_rank_factors_are_merged_and_also_an_adapter_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    config = load_config(
        "digits",
        ["method.name=fed-lora", "method.rank=2", "method.targets=['q','v','fc1']", "model.dim=16", "model.depth=2"],
    )
    net = build_net(config, 3, 3, 16)
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(t.shape, generator=generator) * 0.2 for name, t in net.initial_weights().items()}
    data = DataInfo("photos", ("grass", "roof", "sea"), 3, 16)
    model = Classifier(net, weights, model_info(config, data, net, rounds=1))
    assert write_export(model, "timm", tmp_path).max_difference < 1e-4  # merged
    adapted = PeftModel.from_pretrained(frozen_base(model), str(tmp_path / "adapter")).eval()
    pixels = images_for(model, 10)
    with torch.inference_mode():
        logits = adapted(model.preprocess(pixels))
    torch.testing.assert_close(logits, reference(model, pixels), atol=1e-4, rtol=0)
    without = frozen_base(model)(model.preprocess(pixels))
    assert not torch.allclose(without, logits, atol=1e-2), "the factors matter"
    frozen = load_file(tmp_path / "base.safetensors")
    assert not any(name.startswith("head.") or "lora" in name for name in frozen)


def test_a_clients_model_is_exported_with_a_card(photo_run: vitfleet.Run, tmp_path: Path) -> None:
    written = vitfleet.export(photo_run, "safetensors", tmp_path / "out", client=2)
    model = vitfleet.load_model(tmp_path / "out" / "model.safetensors")
    assert model.info.client == 2
    pixels = images_for(model, 4)
    assert torch.equal(reference(model, pixels), reference(photo_run.model(client=2), pixels))
    card = (tmp_path / "out" / "README.md").read_text()
    front, _, text = card.removeprefix("---\n").partition("\n---\n")
    assert "pipeline_tag: image-classification" in front.splitlines()
    assert "model-index:" not in front, "the accuracy of one client's model is not measured"
    for heading in ("Use", "Data", "Method", "Fleet", "Accuracy", "Costs", "Privacy"):
        assert f"\n## {heading}\n" in text
    assert "client 2's own model" in text
    assert "grass, roof, sea" in text
    assert json.loads((tmp_path / "out" / "preprocessing.json").read_text())["input_size"] == 16
    assert written.compared == 12  # the run's test images


@pytest.mark.parametrize(
    ("format", "says"),
    [
        ("torch-export", "takes it as [batch, 3, 8, 8], pixels in 0…1. Inside it is normalised with mean [0.5"),
        ("timm", "Then it is normalised with mean [0.5"),
        ("safetensors", "`vitfleet.load_model` does all of it"),
    ],
)
def test_the_card_says_which_images_this_file_takes(
    format: str, says: str, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """The photos are stored at 16 pixels, and the network takes 8: so does the file."""
    draw_photos(tmp_path / "photos", ("sea", "roof"))
    own = (f"data.path={tmp_path / 'photos'}", "model.image_size=8", "fleet.clients=3", "rounds=1")
    run = make_run(tmp_path / "run", *tiny_overrides, *own)
    vitfleet.export(run, format, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "resized to 8 x 8 pixels of 3 channels (bilinear, with antialiasing)" in card
    assert says in card
    assert "In training images were stored at 16 x 16 pixels first." in card


def test_the_card_of_the_servers_model_has_its_accuracy(photo_run: vitfleet.Run, tmp_path: Path) -> None:
    vitfleet.export(photo_run, "timm", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    accuracy = photo_run.summary["server_model"]["accuracy"]
    assert f"metrics: [{{type: accuracy, value: {accuracy:.4f}}}]" in card
    assert f"the server's model: {accuracy:.2%}" in card


@needs_onnx
@pytest.mark.long
def test_the_accuracy_of_eight_bit_weights_is_measured(photo_run: vitfleet.Run, tmp_path: Path) -> None:
    draw_photos(tmp_path / "photos", ("grass", "roof", "sea"), 5)
    written = vitfleet.export(photo_run, "onnx", tmp_path / "out", int8=True, data=tmp_path / "photos")
    assert written.quantised is not None
    assert written.quantised.images == 15
    (evaluation,), _ = vitfleet.evaluate(photo_run, tmp_path / "photos")
    assert written.quantised.original_accuracy == pytest.approx(evaluation.accuracy)
    assert "eight-bit weights" in (tmp_path / "out" / "README.md").read_text()


def test_what_a_format_cannot_do_is_said(
    photo_run: vitfleet.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="--to keras: must be one of safetensors, timm"):
        vitfleet.export(photo_run, "keras", tmp_path)
    with pytest.raises(UserError, match="--int8: eight-bit weights are written for --to onnx only"):
        vitfleet.export(photo_run, "timm", tmp_path, int8=True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="--push-to-hub me/mine: no token is set"):
        vitfleet.export(photo_run, "timm", tmp_path / "model", push_to_hub="me/mine")
    with pytest.raises(UserError, match="--push-to-hub mine: must be OWNER/NAME"):
        vitfleet.export(photo_run, "timm", tmp_path / "model", push_to_hub="mine")
    assert not (tmp_path / "model").exists()
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no earlier export"):
        vitfleet.export(photo_run, "timm", tmp_path)


def test_a_folder_is_uploaded_where_a_token_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Hub:
        def __init__(self, token: str) -> None:
            calls.append(("token", token))

        def create_repo(self, repository: str, private: bool, exist_ok: bool) -> str:
            calls.append(("create", (repository, private)))
            return f"https://hub/{repository}"

        def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
            calls.append(("upload", (repo_id, folder_path)))

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert upload(tmp_path, "me/mine") == "https://hub/me/mine"
    assert calls == [("token", "secret"), ("create", ("me/mine", True)), ("upload", ("me/mine", tmp_path))]

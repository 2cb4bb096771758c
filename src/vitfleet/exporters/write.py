"""Export of a model: write it, compare it with the original, measure what quantisation costs, describe it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from vitfleet.data.images import ImageSet
from vitfleet.errors import UserError, how_to_install
from vitfleet.exporters.graph import BATCH, GRAPH_FORMATS, ExportGraph, onnx_logits, quantise_onnx
from vitfleet.exporters.weights import ADAPTER_FOLDER, BASE_FILE, has_lora, write_peft_adapter, write_timm
from vitfleet.files import MODEL_FILE, make_folder, write_atomically
from vitfleet.inference.classifier import Classifier
from vitfleet.inference.stored_models import load_model_file
from vitfleet.run.output.model_file import write_model

FORMATS = ("safetensors", "timm", *GRAPH_FORMATS)
Logits: TypeAlias = Callable[[Tensor], Tensor]  # of images as the graph takes them
COMPARED_IMAGES = 100  # with which an exported model is compared with the original
MAX_DIFFERENCE = 1e-3  # of logits: more is an error, not rounding
PREPROCESSING_FILE = "preprocessing.json"
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime")}  # that a format needs


@dataclass(frozen=True)
class Quantised:
    """What eight-bit weights cost."""

    images: int  # labelled ones, on which both accuracies were measured; 0: there were none
    accuracy: float | None
    original_accuracy: float | None
    agreement: float  # share of images with the same predicted class
    bytes: int  # of the files
    original_bytes: int


@dataclass(frozen=True)
class Export:
    """An exported model.

    Attributes
    ----------
    files
        What was written.
    max_difference
        Largest difference between a logit of the exported model and of the original, over ``compared`` images.
    """

    folder: Path
    format: str
    files: list[Path]
    max_difference: float
    compared: int
    quantised: Quantised | None = None


def write_export(
    model: Classifier, format: str, folder: Path, int8: bool = False, labelled: ImageSet | None = None
) -> Export:
    """Write a model in a format and compare what was written with the original, on random images if none are labelled.

    With ``int8`` the ONNX model is written with eight-bit weights too, and measured.
    """
    if format not in FORMATS:
        raise UserError(f"--to {format}: must be one of {', '.join(FORMATS)}")
    if int8 and format != "onnx":
        raise UserError(f"--int8: eight-bit weights are written for --to onnx only, not for {format}")
    _check_packages(model, format)
    is_new = not folder.exists()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PREPROCESSING_FILE).exists():
        raise UserError(f"--out {folder}: is not empty and holds no earlier export; choose another --out")
    make_folder(folder)
    try:
        return _write_compared(model.cpu(), format, folder, int8, labelled)
    except BaseException:
        if is_new:  # nothing is better than a part of a model
            shutil.rmtree(folder)
        raise


def _check_packages(model: Classifier, format: str) -> None:
    needed = PACKAGES.get(format, ()) or (("peft",) if has_lora(model) and format not in GRAPH_FORMATS else ())
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UserError(f"--to {format}: needs {', '.join(missing)}; {how_to_install('export')}")


def _write_compared(model: Classifier, format: str, folder: Path, int8: bool, labelled: ImageSet | None) -> Export:
    graph = ExportGraph(model)
    images = graph.example(COMPARED_IMAGES) if labelled is None else graph.prepare(labelled.images[:COMPARED_IMAGES])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about their own insides
        files, logits = _write(model, graph, format, folder)
    difference = float((logits(images) - _in_batches(graph, images)).abs().max())
    if not difference <= MAX_DIFFERENCE:
        raise UserError(f"--to {format}: the written model is not the original: logits differ by {difference:.3g}")
    quantised = None
    if int8:
        files.append(folder / "model-int8.onnx")
        quantise_onnx(files[0], files[-1])
        quantised = _measure(files[0], files[-1], graph, labelled, images)
    write_atomically(folder / PREPROCESSING_FILE, json.dumps(asdict(graph.info), indent=1).encode())
    return Export(folder, format, [*files, folder / PREPROCESSING_FILE], difference, len(images), quantised)


def _write(model: Classifier, graph: ExportGraph, format: str, folder: Path) -> tuple[list[Path], Logits]:
    """Write a model and return its files, and the function that computes logits from them."""
    logits: Logits
    if format in GRAPH_FORMATS:
        name, write_graph, logits_of_file = GRAPH_FORMATS[format]
        write_graph(graph, folder / name)
        return [folder / name], partial(logits_of_file, folder / name)
    files = [folder / MODEL_FILE]
    if format == "timm":
        logits = partial(graph.with_network, write_timm(model, graph, folder))
        files.append(folder / "config.json")
    else:
        write_model(files[0], model.net, model.vit.state_dict(), model.info)
        logits = partial(_in_batches, ExportGraph(load_model_file(files[0])))
    if has_lora(model):
        write_peft_adapter(model, folder)
        files += [folder / BASE_FILE, folder / ADAPTER_FOLDER]
    return files, logits


def _in_batches(graph: ExportGraph, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([graph(batch) for batch in torch.split(images, BATCH)])


def _measure(original: Path, path: Path, graph: ExportGraph, labelled: ImageSet | None, images: Tensor) -> Quantised:
    """Compare a quantised model with the original one: on labelled images, or without accuracy on others."""
    inputs = images if labelled is None else graph.prepare(labelled.images)
    before, after = (onnx_logits(file, inputs).argmax(dim=1) for file in (original, path))
    labels = None if labelled is None else labelled.labels.cpu()
    accuracy, original_accuracy = (
        None if labels is None else float((predicted == labels).float().mean()) for predicted in (after, before)
    )
    return Quantised(
        images=0 if labels is None else len(labels),
        accuracy=accuracy,
        original_accuracy=original_accuracy,
        agreement=float((before == after).float().mean()),
        bytes=path.stat().st_size,
        original_bytes=original.stat().st_size,
    )


def check_upload(repository: str) -> None:
    """Raise an error if nothing can be uploaded to the Hugging Face hub, before anything is written."""
    from huggingface_hub import get_token

    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UserError(f"--push-to-hub {repository}: must be OWNER/NAME")
    if get_token() is None:
        raise UserError(f"--push-to-hub {repository}: no token is set; set HF_TOKEN, or log in with `hf auth login`")


def upload(folder: Path, repository: str) -> str:
    """Upload an exported model to the Hugging Face hub as a private repository ``owner/name``; return its address."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    hub = HfApi(token=get_token())
    try:
        address = str(hub.create_repo(repository, private=True, exist_ok=True))
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Model exported by vitfleet")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"--push-to-hub {repository}: {str(error).splitlines()[0]}") from None
    return address

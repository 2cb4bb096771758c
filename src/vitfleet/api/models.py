"""Using trained models: load, predict, evaluate, export, show on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from vitfleet.api.run import Run
from vitfleet.config.registry import method_label
from vitfleet.data.images import ImageSet
from vitfleet.data.sources.load import load_dataset
from vitfleet.demo.server import DemoServer
from vitfleet.errors import UserError
from vitfleet.exporters.model_card import model_card
from vitfleet.exporters.write import Export, check_upload, upload, write_export
from vitfleet.files import write_atomically
from vitfleet.inference.classifier import Classifier, ImagePrediction, predict_files
from vitfleet.inference.evaluate import Evaluation, evaluate_images
from vitfleet.inference.image_files import LabelledImages, find_images, read_labelled
from vitfleet.inference.stored_models import load_model_file
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.checkpoints.store import StoredStates

#: A run, its folder, a model file, or a model.
ModelSource: TypeAlias = Run | Classifier | str | Path
COMPARED_IMAGES = 500  # with which an exported model is compared with the original, and its accuracy measured
SHOWN_CLIENTS = 2  # on the page of the demo


def load_model(source: ModelSource, client: int | None = None, device: str = "auto") -> Classifier:
    """Return a trained model.

    Parameters
    ----------
    source
        A run, its folder, or a model file (``model.safetensors``, ``best.safetensors``, a device's own).
    client
        A client's own model, of a run; ``None``: the server's.
    device
        ``cpu``, ``cuda``, or ``auto``: the GPU if there is one.

    Examples
    --------
    >>> vitfleet.load_model("runs/first", client=7).predict("cat.jpg").label
    """
    source = open_source(source)
    if isinstance(source, Run):
        model = source.model(client)
    elif client is not None:
        raise UserError(f"client = {client}: a model file holds one model; name a run's folder to choose a client")
    else:
        model = source
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return model.to(name)


def predict(
    source: ModelSource,
    images: Sequence[str | Path],
    *,
    client: int | None = None,
    task: int | None = None,
    batch_size: int = 64,
    device: str = "auto",
    progress: Progress = NO_PROGRESS,
) -> list[ImagePrediction]:
    """Predict the classes of image files.

    Parameters
    ----------
    source, client, device
        As for :func:`load_model`.
    images
        Files, and folders whose images are all predicted.
    task
        The task of the images, of a model that was trained on tasks: only its classes are candidates.

    Examples
    --------
    >>> for image in vitfleet.predict("runs/first", ["photos"], client=7):
    ...     print(image.path, image.prediction.top(3) if image.prediction else image.note)
    """
    model = load_model(source, client, device)
    return list(predict_files(model, find_images(map(Path, images)), task, batch_size, progress))


def evaluate(
    source: ModelSource,
    data: str | Path | None = None,
    *,
    client: int | Literal["all"] | None = None,
    known_task: bool = False,
    batch_size: int = 64,
    device: str = "auto",
    progress: Progress = NO_PROGRESS,
) -> tuple[list[Evaluation], tuple[str, ...]]:
    """Evaluate a model on labelled images: accuracy, per class, confusion matrix, calibration.

    Parameters
    ----------
    source, device
        As for :func:`load_model`.
    data
        A folder with one subfolder per class; ``None``: the test images of the run's own data set.
    client
        A client's own model, or ``"all"``: each client's; ``None``: the server's model.
    known_task
        Whether the model is told each image's task.

    Returns
    -------
    tuple
        One evaluation per model, and one line for each file or folder that needs a remark.
    """
    source = open_source(source)
    models = _models(source, client, device)
    first = next(models)
    labelled = labelled_images(source, first, data, progress)
    evaluations = [
        evaluate_images(model, labelled.images, known_task, batch_size, progress) for model in chain([first], models)
    ]
    return evaluations, labelled.notes


def export(
    source: ModelSource,
    to: str,
    out: str | Path,
    *,
    client: int | None = None,
    int8: bool = False,
    data: str | Path | None = None,
    images: int = COMPARED_IMAGES,
    push_to_hub: str | None = None,
    progress: Progress = NO_PROGRESS,
) -> Export:
    """Write a trained model in the format of other software, with a model card, and compare it with the original.

    Parameters
    ----------
    source, client
        As for :func:`vitfleet.load_model`.
    to
        ``safetensors``, ``timm``, ``onnx``, ``executorch`` or ``torch-export``.
    out
        The folder to write to.
    int8
        Write an ONNX model with eight-bit weights too, and measure its accuracy.
    data
        Labelled images for the comparison, one subfolder per class. ``None``: the test images of the run's data, or
        random images where these are not to be had.
    images
        How many of them, spread over all.
    push_to_hub
        ``owner/name`` on the Hugging Face hub; a token must be set.

    Examples
    --------
    >>> vitfleet.export("runs/first", "onnx", "exported", client=7, int8=True).quantised
    """
    if push_to_hub is not None:
        check_upload(push_to_hub)
    opened = open_source(source)
    model = load_model(opened, client, device="cpu")
    labelled = _comparison_images(opened, model, data, images, progress)
    with progress.task(f"writing {to}", 1):
        result = write_export(model, to, Path(out), int8, labelled)
    run = opened if isinstance(opened, Run) else None
    config, summary = (run.config, run.summary if run.finished else None) if run else (None, None)
    card = model_card(model, result, config, summary)
    write_atomically(result.folder / "README.md", card.encode())
    if push_to_hub is not None:
        upload(result.folder, push_to_hub)
    return result


def demo_server(
    source: ModelSource,
    clients: Sequence[int] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    device: str = "auto",
) -> DemoServer:
    """Return a server of the demo page, which ``serve_forever()`` runs.

    Parameters
    ----------
    source
        A run, its folder, or a model file.
    clients
        Clients whose own models are shown beside the server's. ``None``: the first two that have one.
    host, port
        Address to listen at: this machine only by default. Port 0: any free one.
    """
    opened = open_source(source)
    first = load_model(opened, None, device)
    if not isinstance(opened, Run):
        return DemoServer(host, port, f"{first.info.method['name']} on {first.info.data.name}", {"model": first})
    # The first clients that have a state, and so a model, of their own.
    chosen = sorted(StoredStates.of_run(opened.path).manifest.clients)[:SHOWN_CLIENTS] if clients is None else clients
    own = {f"client {client}'s model": load_model(opened, client, device) for client in chosen}
    title = f"{method_label(opened.config.method.name)} on {first.info.data.name}: {opened.path.resolve().name}"
    return DemoServer(host, port, title, {"server's model": first, **own})


def open_source(source: ModelSource) -> Run | Classifier:
    """Return the run in a folder, or the model in a file; anything else as it is."""
    if not isinstance(source, str | Path):
        return source
    path = Path(source)
    if path.is_dir():
        return Run(path)
    if not path.exists():
        raise UserError(f"{path}: no such run folder or model file")
    return load_model_file(path)


def _models(source: Run | Classifier, client: int | Literal["all"] | None, device: str) -> Iterator[Classifier]:
    """Yield the chosen models one after the other: those of all clients would not fit in memory at once."""
    if client != "all":
        yield load_model(source, client, device)
    elif isinstance(source, Run):
        yield from (load_model(source, number, device) for number in range(source.config.fleet.clients))
    else:
        raise UserError("client = all: a model file holds one model; name a run's folder")


def labelled_images(
    source: Run | Classifier, model: Classifier, data: str | Path | None, progress: Progress = NO_PROGRESS
) -> LabelledImages:
    """Return the images of a folder, or the test images of a run's own data."""
    if data is not None:
        return read_labelled(Path(data), model.classes, model.image_size, model.channels, progress)
    if not isinstance(source, Run):
        raise UserError("a model file has no images of its own; name a folder with --data")
    return LabelledImages(load_dataset(source.config.data, progress).test)


def _comparison_images(
    source: Run | Classifier, model: Classifier, data: str | Path | None, count: int, progress: Progress
) -> ImageSet | None:
    """Return labelled images, evenly spread over all; ``None`` if the run's own data is not on this machine."""
    if data is None and not isinstance(source, Run):
        return None
    try:
        found = labelled_images(source, model, data, progress).images
    except (UserError, OSError):
        if data is not None:
            raise
        return None  # the run was moved away from its data: the comparison needs no labels
    return found.take(torch.linspace(0, len(found) - 1, min(count, len(found))).long())

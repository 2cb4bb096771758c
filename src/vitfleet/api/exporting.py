"""Exporting a trained model to the formats of other software."""

from __future__ import annotations

from pathlib import Path

import torch

from vitfleet.api.models import ModelSource, labelled_images, load_model, open_source
from vitfleet.api.run import Run
from vitfleet.data.images import ImageSet
from vitfleet.errors import UserError
from vitfleet.exporters.hub import push_to_hub as push
from vitfleet.exporters.model_card import model_card
from vitfleet.exporters.write import Export, write_export
from vitfleet.files import write_atomically
from vitfleet.inference.classifier import Classifier
from vitfleet.progress import NO_PROGRESS, Progress

CHECKED_IMAGES = 500


def export(
    source: ModelSource,
    to: str,
    out: str | Path,
    *,
    client: int | None = None,
    int8: bool = False,
    data: str | Path | None = None,
    images: int = CHECKED_IMAGES,
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
        push(result.folder, push_to_hub)
    return result


def _comparison_images(
    source: Run | Classifier, model: Classifier, data: str | Path | None, count: int, progress: Progress
) -> ImageSet | None:
    """Return labelled images, evenly spread over all; ``None`` if the run's own data is not to be had here."""
    if data is None and not isinstance(source, Run):
        return None
    try:
        found = labelled_images(source, model, data, progress).images
    except (UserError, OSError):
        if data is not None:
            raise
        return None  # the run was moved away from its data: the comparison needs no labels
    return found.take(torch.linspace(0, len(found) - 1, min(count, len(found))).long())
